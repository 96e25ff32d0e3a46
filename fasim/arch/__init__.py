"""Architectures: files of rates, latencies and capacities, and the classes that say what they hold."""

from fasim.arch.files import Arch, Provenance, arch_folder, arch_schema, check_arch, list_archs, load_arch

__all__ = ["Arch", "Provenance", "arch_folder", "arch_schema", "check_arch", "list_archs", "load_arch"]
