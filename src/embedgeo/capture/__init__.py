"""Reading a model: how it is built, which layers it has, what a forward pass is given and what it gives."""
