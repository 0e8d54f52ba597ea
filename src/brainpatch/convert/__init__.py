"""Patches from and to the files of other tools. One file here for each form; `formats` lists them."""

from __future__ import annotations

from brainpatch.convert.form import Format, Written
from brainpatch.convert.formats import FORMATS, convert, readable, writable

__all__ = ["FORMATS", "Format", "Written", "convert", "readable", "writable"]
