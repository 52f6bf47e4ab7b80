"""The policy: packed log-probs of a causal language model. May import `backbone`, `lora`, `loading` and `logprobs`."""
