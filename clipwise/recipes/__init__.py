"""Small built-in runs."""

from .digits import RunResult as RunResult
from .digits import train_digits as train_digits
