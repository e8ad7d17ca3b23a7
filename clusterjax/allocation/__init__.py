"""Allocation: which step holds which examples, where they lie, and their weights.

NumPy only. Membership (`membership`) never depends on devices; placement (`placement`,
`packing`) never changes a result (METHOD §4–5).
"""

from clusterjax.allocation.figures import Figures as Figures
from clusterjax.allocation.figures import measure as measure
from clusterjax.allocation.schedule import Schedule as Schedule
from clusterjax.allocation.schedule import allocate as allocate
from clusterjax.steps import Placement as Placement
from clusterjax.steps import Step as Step
