"""Small integers <-> bytes, along the last axis. What is stored is what is counted.

Widths 1, 2, 4 and 8 fill one plane of bytes. Three bits, the paper's width, are stored as 12-bit
words of four codes: a plane of low bytes, and a plane of nibbles in which word j shares a byte with
word j + dim/8; one table look-up then decodes four codes. Widths 5, 6, 7 are a 4-bit plane and the
rest.
"""

from functools import cache

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

Codes = UInt8[Tensor, "*batch dim"]
Words = Int32[Tensor, "*batch word"]
Planes = tuple[Tensor, ...]  # each UInt8[Tensor, "*batch bytes"]


def pack(codes: Codes, bits: int) -> Planes:
    """Planes of dim * bits / 8 bytes a token in all; dim must be a multiple of 8."""
    if bits in (5, 6, 7):
        return *pack(codes & 15, 4), *pack(codes >> 4, bits - 4)
    return stored_words(to_words(codes, bits), bits)


def to_words(codes: Codes, bits: int) -> Words:
    """Codes that are decoded together, as one number: four of 3 bits, else those of a byte."""
    if codes.shape[-1] % 8:
        raise ValueError(
            f"head_dim={codes.shape[-1]} can not be packed at {bits} bits without waste; packing "
            "needs a multiple of 8. Use FullPrecision or Int8 for this model."
        )
    if bits == 3:
        four = codes.contiguous().view(torch.int32)  # a byte each: moved all at once
        two = (four | four >> 5).bitwise_and_(0x003F003F)
        return (two | two >> 10).bitwise_and_(0x0FFF)
    fields = codes.unflatten(-1, (-1, 8 // bits))
    byte = fields[..., 0].clone()
    for j in range(1, 8 // bits):
        byte |= fields[..., j] << j * bits
    return byte.to(torch.int32)


def stored_words(words: Words, bits: int) -> Planes:
    """The planes of bytes that hold words."""
    low = words.to(torch.uint8)
    return (low, _paired((words >> 8).to(torch.uint8))) if bits == 3 else (low,)


def unpack(planes: Planes, bits: int) -> Codes:
    """The codes, one a byte: the inverse of `pack`."""
    if bits in (5, 6, 7):
        return unpack(planes[:1], 4) | unpack(planes[1:], bits - 4) << 4
    return look_up(planes, bits, _all_codes(bits, planes[0].device))


def look_up(
    planes: Planes, bits: int, table: Float[Tensor, "word code"] | UInt8[Tensor, "word code"]
) -> Tensor:
    """[*batch, dim]: what a `word_table` holds for packed codes of 1, 2, 3, 4 or 8 bits."""
    if bits == 3:
        low, nibbles = planes
        words = low.to(torch.int32).add_(_nibbles(nibbles), alpha=256)
    else:
        words = planes[0].to(torch.int32)
    return entries(words, table)


def entries(words: Words, table: Float[Tensor, "row code"] | UInt8[Tensor, "row code"]) -> Tensor:
    """[*batch, dim]: the rows of a table for words, side by side.

    A row is read as one wide element: index_select on a vector of 4- to 16-byte elements is several
    times faster than on rows.
    """
    wide = _WIDE.get(table.shape[1] * table.element_size())
    if wide is None:
        rows = table.index_select(0, words.flatten())
    else:
        rows = table.view(wide).flatten().index_select(0, words.flatten()).view(table.dtype)
    return rows.view(*words.shape[:-1], words.shape[-1] * table.shape[1])


def _nibbles(x: UInt8[Tensor, "*batch bytes"]) -> UInt8[Tensor, "*batch nibbles"]:
    """The low nibbles of all bytes, then the high ones; several bytes at a time."""
    for wide, mask in _MASKS:
        if x.shape[-1] % wide.itemsize == 0:
            several = _aligned(x, wide.itemsize).view(wide)
            return torch.cat((several & mask, several >> 4 & mask), dim=-1).view(torch.uint8)
    return torch.cat((x & 15, x >> 4), dim=-1)


def _paired(nibbles: UInt8[Tensor, "*batch nibbles"]) -> UInt8[Tensor, "*batch bytes"]:
    """The inverse of `_nibbles`."""
    wide = next(t for t in _PAIRED if nibbles.shape[-1] % (2 * t.itemsize) == 0)
    low, high = nibbles.view(wide).chunk(2, dim=-1)
    return (low | high << 4).view(torch.uint8)


def _aligned(x: Tensor, size: int) -> Tensor:
    """The bytes where elements of `size` bytes may begin at each row; a copy where they lie not."""
    *outer, last = x.stride()
    if last == 1 and not any(n % size for n in (x.storage_offset(), *outer)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


_MASKS = ((torch.int64, 0x0F0F0F0F0F0F0F0F), (torch.int16, 0x0F0F))
_PAIRED = (torch.int64, torch.int16, torch.uint8)
_WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def word_table(levels: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """[words, codes a word]: the levels behind every packed word, as `look_up` wants them."""
    codes = _all_codes(bits, levels.device)
    return levels.to(dtype)[codes.long()]


@cache
def _all_codes(bits: int, device: torch.device) -> UInt8[Tensor, "word code"]:
    n_codes = 4 if bits == 3 else 8 // bits
    words = torch.arange(2 ** (bits * n_codes), device=device)
    shifts = bits * torch.arange(n_codes, device=device)
    return (words[:, None] >> shifts & (2**bits - 1)).to(torch.uint8)
