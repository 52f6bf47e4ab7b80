"""Tables of text and vision architectures, a row each; patches and families of a user. May import `own_decoder`."""
