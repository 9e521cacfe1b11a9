"""The engines, in the order in which they are tried."""

from whorl.engines.base import Engine
from whorl.engines.cpu import CPU
from whorl.engines.cuda.cudnn import CuDNNBesideStepwise
from whorl.engines.cuda.persistent import Persistent
from whorl.engines.cuda.stepwise import Stepwise
from whorl.engines.native import OneDNN
from whorl.engines.reference import Reference

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (Persistent(), CuDNNBesideStepwise(), Stepwise(), CPU(), OneDNN(), Reference())
}
