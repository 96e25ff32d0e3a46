"""What attention kernels share, in FlashAttention's words: which blocks a tile visits, and the grid of tiles."""
