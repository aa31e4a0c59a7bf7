"""Whether products on the accelerator agree with those on the CPU."""

from __future__ import annotations

import torch


def main() -> None:
    """Multiply and compare."""
    device = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else torch.device("cuda")
    assert device is not None, "there is no device"
    dtype = torch.float32 if device.type == "mps" else torch.float64
    a = torch.rand(300, 300, dtype=dtype)
    assert torch.allclose((a.to(device) @ a.to(device)).cpu(), a @ a), "the device gives wrong products"


if __name__ == "__main__":
    main()
