"""What numba has compiled, or loaded from its cache, in this process."""

import sys

from numba.core.dispatcher import Dispatcher

PACKAGES = ("freedraft", "sssd_plugin", "layerskip_plugin")


def signatures() -> set[str]:
    """Functions of ours with the types of arguments that they are compiled for."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(PACKAGES)]
    functions = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, Dispatcher)}
    return {f"{one.__module__}.{one.__name__}{kinds}" for one in functions.values() for kinds in one.signatures}
