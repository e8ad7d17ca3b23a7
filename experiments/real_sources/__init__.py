"""Real instruction data out of published packages, read where they lie.

Nothing of the packages is part of this repository: `python -m experiments.real_sources`
reads wheels, source archives, npm and Debian packages that you have fetched by name.
"""
