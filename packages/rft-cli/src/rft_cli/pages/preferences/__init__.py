"""Plan pages of trainings on pairs of responses. May import `pages`."""
