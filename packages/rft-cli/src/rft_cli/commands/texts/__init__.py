"""Commands on texts: tokenizers that are made from them, and how well a model predicts them."""
