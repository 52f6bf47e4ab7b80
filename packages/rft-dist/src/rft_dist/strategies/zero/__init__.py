"""DeepSpeed ZeRO 1 to 3 with checkpoints in the common format. May import what `strategies` may."""
