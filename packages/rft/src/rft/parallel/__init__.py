"""Models and optimizers over ranks: data, sequence, tensor parallel, FSDP2, ZeRO. May import `process`."""
