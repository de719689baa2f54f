"""The zoo's classes for runs in Theano's mode FAST_COMPILE."""

import theano_convolutions  # noqa: F401 - before anything imports theano
from cifar10 import Cifar10  # noqa: F401
from lsgan import LSGAN  # noqa: F401
from wgan import WGAN  # noqa: F401
