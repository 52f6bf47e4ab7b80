"""Tables of text and vision architectures, a row each; patches and families of a user. Imports no other room."""
