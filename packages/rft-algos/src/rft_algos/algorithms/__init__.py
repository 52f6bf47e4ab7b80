"""Published algorithms as torch-free records, and the components that they are composed of. Imports no other room."""
