"""Starting up: an engine loads the guard in every one of its processes."""


class Import:
    """In a fresh interpreter each time."""

    version = "1"

    def timeraw_nothing(self) -> str:
        return "pass"

    def timeraw_numpy(self) -> str:
        return "import numpy"

    def timeraw_ubatch_guard(self) -> str:
        return "import ubatch_guard"
