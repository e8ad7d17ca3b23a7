"""Selection: which examples are kept, and what share their clusters have (METHOD §3).

NumPy only. The heavy rules (k-center, herding) have plain NumPy forms here; a caller
with accelerators hands in jitted ones as `subset_rules`.
"""

from clusterjax.plan import SelectionPlan as SelectionPlan
from clusterjax.selection.planner import select as select
