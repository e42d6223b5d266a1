"""Being stopped from outside: it passes through the user's code, and is no error of theirs."""


class Terminated(BaseException):
    """SIGTERM arrived; like Ctrl-C, it unwinds, so that what is finished is kept."""


STOPS = (KeyboardInterrupt, Terminated, GeneratorExit)
