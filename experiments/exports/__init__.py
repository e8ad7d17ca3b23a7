"""A plan in the file formats of other trainers (`experiments.plan export`)."""
