"""How the embedded model is made: text, tokens, training, card."""
