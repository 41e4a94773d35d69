"""The reports about data that `t5x data` prints."""

from t5x.data.view.examples import report, view_named

__all__ = ["report", "view_named"]
