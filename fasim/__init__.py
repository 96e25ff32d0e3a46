"""fasim: a discrete-event simulator of attention kernels on NVIDIA GPUs."""

__version__ = "0.1.0"
