"""Reading a model: its structure, its layers, and the inputs and hidden states of its forward
passes.
"""
