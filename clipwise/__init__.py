"""clipwise trains PyTorch models under (ε, δ)-differential privacy without a clipping threshold to tune."""

from .accounting import Search as Search
from .accounting import calibrate as calibrate
from .accounting import calibrate_search as calibrate_search
from .accounting import epsilon as epsilon
from .accounting import tuning_epsilon as tuning_epsilon
from .batch_norm import fix_batch_norm as fix_batch_norm
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .clipping import clipped_sum as clipped_sum
from .engine.check import check_op_rule as check_op_rule
from .engine.contributions import Dense as Dense
from .engine.contributions import Outer as Outer
from .engine.contributions import Rows as Rows
from .engine.ops import OpRule as OpRule
from .engine.preflight import preflight as preflight
from .evaluation import private_score as private_score
from .ledger import Ledger as Ledger
from .ledger_file import read_ledger as read_ledger
from .plan import Plan as Plan
from .privatize import privatize as privatize
from .rules import PSAC as PSAC
from .rules import Abadi as Abadi
from .rules import AutoS as AutoS
from .rules import AutoV as AutoV
from .rules import Global as Global
from .rules import PerLayer as PerLayer
from .rules import Reparam as Reparam
from .rules import Rule as Rule
from .rules import check_rule as check_rule
from .sampling import PoissonBatch as PoissonBatch
from .threshold_check import check_threshold as check_threshold
from .thresholds import DecayThreshold as DecayThreshold
from .thresholds import FixedThreshold as FixedThreshold
from .thresholds import MinErrorThreshold as MinErrorThreshold
from .thresholds import PercentileThreshold as PercentileThreshold
from .thresholds import QuantileThreshold as QuantileThreshold
from .thresholds import Threshold as Threshold
from .training import PrivateTraining as PrivateTraining
from .trials import Trial as Trial
from .tuning import LogUniform as LogUniform
from .tuning import TuningPlan as TuningPlan
from .tuning import Winner as Winner
from .tuning import tune as tune

__version__ = "0.1.0"
