"""clusterjax: cheaper instruction tuning under data parallelism.

Gradient features → clusters → balanced plan → schedule → weighted training
(the CluSTER method, arXiv 2609.12584). Every stage can be used alone.
"""

__version__ = "0.1.0"
