"""Names of the family, without torch."""

MODEL_TYPE = "rft_decoder"
"""`model_type` in config.json."""
CLASS_NAME = "RftDecoderForCausalLM"
"""The architecture in config.json."""
