"""A value for every token. May import `policy`, `reward_model` and the rooms below them."""
