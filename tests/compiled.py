"""A backend of torch.compile that counts how often its graphs run."""

from torch._dynamo import lookup_backend


class CountingBackend:
    """Has graphs made by another backend: ``eager`` runs them as they are, ``aot_eager`` also
    backward passes.
    """

    def __init__(self, backend):
        self.compile = lookup_backend(backend)
        self.runs = 0

    def __call__(self, graph, inputs):
        compiled = self.compile(graph, inputs)

        def run(*args):
            self.runs += 1
            return compiled(*args)

        return run
