import gin

from t5x.errors import UserError


class NeedsCode(UserError):
    exit_code = 7

    def __init__(self, code, place):
        super().__init__(f"code {code} at {place}")


def fails(x=1):
    raise UserError("The file is damaged. Download it again.")


def special():
    raise NeedsCode(3, "here")


def has_a_bug(x=1):
    raise KeyError("inside")


def helper(a, b):
    return a


def calls_wrongly():
    return helper(1)


class Model:
    def __init__(self, size, *, depth, width=1):
        self.size = size


class Holder:
    def __init__(self, model):
        self.model = model


@gin.configurable
def marked(x=gin.REQUIRED, y=gin.REQUIRED):
    return x
