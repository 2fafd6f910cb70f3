"""Feature maps in 8 bits."""

import torch

from branchout.method.compressed_maps import as_cached, as_computed


def test_compressed_maps_take_a_quarter_of_the_memory_and_stay_close() -> None:
    maps = torch.randn(3, 6, 4, 5, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 6).view(-1, 1, 1)
    maps[1, 2] = 0
    for layout in (torch.contiguous_format, torch.channels_last):
        kept = as_cached(maps, compressed=True).contiguous(memory_format=layout)
        assert kept.dtype == torch.int8
        assert kept.nbytes == maps.numel() * 5 / 4  # and one more row for the scales
        back = as_computed(kept)
        assert back.is_contiguous(memory_format=layout)
        assert ((back - maps).abs() <= maps.abs().amax((2, 3), keepdim=True) / 253).all()
        assert torch.equal(as_computed(kept[[2, 0]]), back[[2, 0]])
    for other in (maps[0], maps[..., :3]):  # tokens, and maps too narrow to hold a scale
        assert as_computed(as_cached(other, compressed=True)) is other
    assert as_cached(maps, compressed=False) is maps
