from rlframe.loops.alerts.base import Alert as Alert
from rlframe.loops.callbacks import Callback as Callback
from rlframe.run.check import check as check
from rlframe.run.config import RunConfig as RunConfig
from rlframe.run.library import run as run
from rlframe.run.load import load as load
from rlframe.utils.errors import ConfigError as ConfigError
from rlframe.utils.errors import RlframeError as RlframeError

__version__: str
