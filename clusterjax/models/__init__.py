"""Language models: decoder, Hugging Face checkpoints, LoRA, generation."""

from clusterjax.models import checkpoints as checkpoints
from clusterjax.models import decoder as decoder
from clusterjax.models import generation as generation
from clusterjax.models import lora as lora
from clusterjax.models import parameters as parameters
from clusterjax.models.checkpoints import load as load
from clusterjax.models.checkpoints import save as save
from clusterjax.models.generation import generate as generate
