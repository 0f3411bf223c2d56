// The grid of LayerMap (layer_map.py). Rows are decoder layers, columns kinds of modules; the left half of a cell is the
// rollout side, the right half the trainer. All state lives in the model: `rollout` and `trainer`, booleans per cell.
const SIDES = ["rollout", "trainer"];

function render({ model, el }) {
  const root = document.createElement("div");
  root.className = "fp8lab-map";
  el.append(root);
  let focus = 0; // index of the one cell that Tab reaches
  let paint = null; // while dragging: the value that is painted

  const names = () => model.get("names");
  const chosen = () => (model.get("side") === "both" ? SIDES : [model.get("side")]);
  const isOn = (i) => chosen().every((side) => model.get(side)[i]);

  function set(indices, value) {
    for (const side of chosen()) {
      const next = [...model.get(side)];
      for (const i of indices) if (i >= 0) next[i] = value;
      model.set(side, next);
    }
    model.save_changes();
  }

  const toggle = (indices) => {
    const real = indices.filter((i) => i >= 0);
    set(real, !real.every(isOn));
  };

  function header(text, indices, label) {
    const button = document.createElement("button");
    button.className = "head";
    button.textContent = text;
    button.title = label;
    button.setAttribute("aria-label", label);
    button.onclick = () => toggle(indices);
    return button;
  }

  function cell(i) {
    const box = document.createElement("button");
    if (i < 0) {
      box.className = "none";
      box.disabled = true;
      return box;
    }
    const name = names()[i];
    const states = SIDES.map((side) => (model.get(side)[i] ? "FP8" : "BF16"));
    const error = model.get("errors")[i];
    const known = error !== null && error !== undefined;
    box.className = "cell";
    box.dataset.layer = name;
    box.dataset.index = i;
    box.tabIndex = i === focus ? 0 : -1;
    box.title = `${name}\nrollout ${states[0]}, trainer ${states[1]}` + (known ? `\n${model.get("error_label")}: ${error.toPrecision(3)}` : "");
    box.setAttribute("aria-label", `${name}, rollout ${states[0]}, trainer ${states[1]}`);
    box.setAttribute("aria-pressed", isOn(i));
    for (const state of states) {
      const half = document.createElement("span");
      half.className = state.toLowerCase();
      box.append(half);
    }
    if (known) {
      const top = Math.max(...model.get("errors").filter((e) => e !== null));
      const bar = document.createElement("i");
      bar.style.width = `${top > 0 ? Math.max(2, (100 * error) / top) : 0}%`;
      box.append(bar);
    }
    box.onpointerdown = (event) => {
      paint = !isOn(i);
      focus = i;
      set([i], paint);
      event.preventDefault();
    };
    box.onpointerenter = () => {
      if (paint !== null && isOn(i) !== paint) set([i], paint);
    };
    box.onkeydown = (event) => move(event, i);
    return box;
  }

  function move(event, i) {
    const rows = model.get("grid");
    const r = rows.findIndex((row) => row.includes(i));
    const c = rows[r].indexOf(i);
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step) {
      const next = rows[r + step[0]]?.[c + step[1]];
      if (next !== undefined && next >= 0) focus = next;
      draw(true);
    } else if (event.key === " " || event.key === "Enter") {
      focus = i;
      toggle([i]);
      draw(true);
    } else return;
    event.preventDefault();
    event.stopPropagation(); // or the notebook takes the key
  }

  function draw(refocus = false) {
    const rows = model.get("grid");
    const columns = model.get("columns");
    root.style.gridTemplateColumns = `auto repeat(${columns.length}, minmax(52px, 1fr))`;
    const parts = [header("all", rows.flat(), "toggle every module")];
    columns.forEach((name, c) => parts.push(header(name, rows.map((row) => row[c]), `toggle ${name} in every layer`)));
    rows.forEach((row, r) => {
      parts.push(header(`layer ${r}`, row, `toggle layer ${r}`));
      row.forEach((i) => parts.push(cell(i)));
    });
    root.replaceChildren(...parts);
    if (refocus) root.querySelector(`[data-index="${focus}"]`)?.focus();
  }

  const release = () => (paint = null);
  const redraw = () => draw(root.contains(document.activeElement) && document.activeElement.dataset.index !== undefined);
  window.addEventListener("pointerup", release);
  const watched = [...SIDES, "side", "errors", "grid"].map((name) => `change:${name}`).join(" ");
  model.on(watched, redraw);
  draw();
  return () => {
    window.removeEventListener("pointerup", release);
    model.off(watched, redraw);
  };
}

export default { render };
