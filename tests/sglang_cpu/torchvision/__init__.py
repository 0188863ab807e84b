"""Stands in for torchvision, see `stand_in`: SGLang and transformers import it for images, which text has none of."""

from enum import Enum

from stand_in import absent_names, add_absent_module

__version__ = "0.0.0"
__getattr__ = absent_names(__name__)


class InterpolationMode(Enum):
    """Looked at, member by member, when transformers is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


add_absent_module("torchvision.io")
add_absent_module("torchvision.transforms").InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
add_absent_module("torchvision.transforms.functional").InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
add_absent_module("torchvision.transforms.v2")
add_absent_module("torchvision.transforms.v2.functional")
