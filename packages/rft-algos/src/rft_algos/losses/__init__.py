"""One loss a function: KL, value, supervised, preference, distillation, off-policy weights. May import `packed`."""
