"""Per-example gradient norms and weighted gradient sums. Knows no clip norm and no noise."""

from .contributions import Dense as Dense
from .contributions import Outer as Outer
from .contributions import Rows as Rows
from .fallback import vmap_gradients as vmap_gradients
from .gradients import Gradients as Gradients
from .op_rule import Call as Call
from .op_rule import OpRule as OpRule
from .products import exact_products as exact_products
from .reduce import Paths as Paths
from .tape import Tape as Tape
