"""Is everything here? Versions, device, threads, memory, and whether page and kernel hear each other."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import anywidget
import torch
import traitlets

from labkit import device

PACKAGES = ("torch", "jupyterlab", "ipywidgets", "anywidget", "matplotlib", "numpy")


class Installation(anywidget.AnyWidget):
    """A table of what is here; its last row is filled by the page itself.

    >>> Installation().rows[0][0]
    'Python'
    """

    rows: traitlets.List[list[str]] = traitlets.List().tag(sync=True)
    _esm = """
    const cell = (tag, words) => Object.assign(document.createElement(tag), { textContent: words })
    function render({ model, el }) {
      const table = document.createElement('table'), asked = performance.now()
      const line = (what, answer) => table.insertRow().append(cell('th', what), answer)
      for (const [what, found] of model.get('rows')) line(what, cell('td', found))
      const answer = cell('td', 'waiting for the kernel …')
      answer.setAttribute('role', 'status')
      line('page and kernel', answer)
      const took = () => Math.round(performance.now() - asked)
      const heard = () => { answer.textContent = `hear each other: ${took()} ms there and back` }
      model.on('msg:custom', heard)
      for (const th of table.querySelectorAll('th')) { th.scope = 'row'; th.style.textAlign = 'left' }
      el.append(table)
      model.send({ asked })
      return () => model.off('msg:custom', heard)
    }
    export default { render }
    """

    def __init__(self) -> None:
        super().__init__(rows=[list(row) for row in found()])
        self.on_msg(lambda widget, content, buffers: widget.send(content))

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle = super()._repr_mimebundle_(**options)
        words = "\n".join(f"{what}: {value}" for what, value in self.rows)
        return (bundle[0] | {"text/plain": words}, bundle[1]) if isinstance(bundle, tuple) else bundle


def found() -> list[tuple[str, str]]:
    """What is installed, and what this process may use, as pairs of words.

    >>> dict(found())["torch"].startswith("2.")
    True
    """
    versions = [(name, importlib.metadata.version(name)) for name in PACKAGES]
    limit = device.memory_limit()
    memory = f"{limit / 2**30:.1f} GiB for all processes together" if limit else "no limit of a container"
    cores = f"{device.threads()} of {os.cpu_count()} cores, as the CPU quota allows"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU, every lab runs on it"
    return [("Python", platform.python_version()), *versions, ("device", gpu), ("threads", cores), ("memory", memory)]
