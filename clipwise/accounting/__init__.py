"""What privacy costs. Descriptions (events) and computations (accountants from dp-accounting) are apart."""

from .accountants import epsilon as epsilon
from .calibrate import calibrate as calibrate
from .events import StepEvent as StepEvent
from .tuning import Search as Search
from .tuning import calibrate_search as calibrate_search
from .tuning import tuning_epsilon as tuning_epsilon
