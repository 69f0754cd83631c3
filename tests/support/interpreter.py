"""What Triton's interpreter lacks for the engines' own kernels."""

from triton.runtime.interpreter import InterpreterBuilder


def take_any_mask():
    """The interpreter refuses masks that are no booleans, which a compiler takes."""

    def with_booleans(original, at):
        def masked(self, *given):
            given[at].data = given[at].data.astype(bool)
            return original(self, *given)

        return masked

    InterpreterBuilder.create_masked_load = with_booleans(InterpreterBuilder.create_masked_load, 1)
    InterpreterBuilder.create_masked_store = with_booleans(InterpreterBuilder.create_masked_store, 2)
