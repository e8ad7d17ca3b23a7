"""Data: sources, layouts, chat templates, checks, and the tokenised corpus."""

from clusterjax.data import chat as chat
from clusterjax.data import tokenizer as tokenizer
from clusterjax.data.corpus import FoundRow as FoundRow
from clusterjax.data.corpus import find_row as find_row
from clusterjax.data.corpus import load as load
from clusterjax.data.corpus import load_eval as load_eval
