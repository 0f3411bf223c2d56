"""BitExplorer: eight clickable bits, and the number they stand for.

Click a bit, and the fields, the formula and the place on the number line follow. Every control is an ordinary button,
so the keyboard works: Tab to a bit, space to flip it.
"""

from __future__ import annotations

import math
from html import escape

import ipywidgets as widgets
import torch

from fp8lab.formats import FORMATS, Float8Format, get_format


class BitExplorer:
    """Show it by ending a cell with it. `code` is the number as an integer 0..255, `value` what it means."""

    def __init__(self, code: int = 0x38, fmt: str = "e4m3") -> None:
        self.format = widgets.ToggleButtons(
            options=[(name.upper(), name) for name in FORMATS],
            value=get_format(fmt).name,
            style={"button_width": "80px"},
        )
        self.bits = [widgets.ToggleButton(value=bool(code >> (7 - i) & 1), layout={"width": "44px"}) for i in range(8)]
        self.down, self.up = (
            widgets.Button(description=text, tooltip=tip, layout={"width": "110px"})
            for text, tip in (("← smaller", "the next smaller code"), ("larger →", "the next larger code"))
        )
        self.note = widgets.HTML()
        for control in (self.format, *self.bits):
            control.observe(lambda change: self._show(), names="value")
        self.down.on_click(lambda button: self._move(-1))
        self.up.on_click(lambda button: self._move(1))
        rows = [self.format, widgets.HBox(self.bits), widgets.HBox([self.down, self.up]), self.note]
        self.view = widgets.VBox(rows)
        self._show()

    @property
    def code(self) -> int:
        """The bits as an integer, sign bit first."""
        return sum(int(bit.value) << (7 - i) for i, bit in enumerate(self.bits))

    @property
    def value(self) -> float:
        """The number the code stands for in the chosen format."""
        return float(self._format.decode(torch.tensor([self.code], dtype=torch.uint8))[0])

    def set(self, code: int) -> None:
        """Show this code, 0..255."""
        if not 0 <= code <= 255:
            raise ValueError(f"code is {code}; a code has eight bits, 0 to 255")
        for i, bit in enumerate(self.bits):
            bit.value = bool(code >> (7 - i) & 1)

    @property
    def _format(self) -> Float8Format:
        return get_format(self.format.value)

    def _move(self, by: int) -> None:
        magnitude = min(0x7F, max(0, (self.code & 0x7F) + by))
        self.set(self.code & 0x80 | magnitude)

    def _show(self) -> None:
        fmt = self._format
        for i, bit in enumerate(self.bits):
            bit.description = str(int(bit.value))
            bit.button_style = "danger" if i == 0 else "warning" if i <= fmt.exponent_bits else "info"
            bit.tooltip = "sign" if i == 0 else "exponent" if i <= fmt.exponent_bits else "fraction"
        self.note.value = f"<pre style='margin:0'>{escape(describe(self.code, fmt))}</pre>"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.view)


def describe(code: int, fmt: Float8Format) -> str:
    """The fields of a code and how its value comes about, in three lines."""
    value = float(fmt.values()[code])
    sign = "-" if code & 0x80 else "+"
    exponent = (code & 0x7F) >> fmt.mantissa_bits
    fraction = code & (2**fmt.mantissa_bits - 1)
    bits = f"{code >> 7} | {exponent:0{fmt.exponent_bits}b} | {fraction:0{fmt.mantissa_bits}b}"
    first = f"0x{code:02x} = {bits}   (sign | exponent {exponent} | fraction {fraction})"
    if not math.isfinite(value):
        return f"{first}\n= {value}: no number\n"
    lead, power = (1, exponent - fmt.bias) if exponent else (0, 1 - fmt.bias)
    kind = "normal" if exponent else "subnormal: no leading 1" if fraction else "zero"
    second = f"= {sign}2^{power} x ({lead} + {fraction}/{2**fmt.mantissa_bits}) = {value:.10g}   {kind}"
    step = float(fmt.spacing(torch.tensor([value]))[0])
    third = f"the next larger magnitude is {step:.10g} away" + (f", {step / abs(value):.1%} of it" if value else "")
    return f"{first}\n{second}\n{'nothing larger: the end of the format' if abs(value) == fmt.max else third}"
