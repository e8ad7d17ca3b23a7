"""Language models: decoder, Hugging Face checkpoints, LoRA, generation."""

from clusterjax.models import checkpoints as checkpoints
from clusterjax.models import decoder as decoder
from clusterjax.models import parameters as parameters
