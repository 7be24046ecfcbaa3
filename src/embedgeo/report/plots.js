// Draws the figures of a report over steps and depth again, from their numbers, so that they answer.
// Lines that are off, scales and zoom are one choice for all figures, and the address keeps it after an "&".
(() => {
  "use strict";
  const { shared, figures } = JSON.parse(document.getElementById("plots").textContent);
  const view = { values: "", steps: "", off: { layer: new Set(), run: new Set() }, zoom: {} };
  const known = { layer: new Map(), run: new Map() }; // colours by name, in order
  const panels = Object.values(figures).flatMap(figure => figure.panels);
  const extent = panels.filter(panel => panel.x.over === "step").flatMap(panel => panel.lines.flatMap(l => shared[l.at]));
  const MAIN = ["layer", "step", "run", "last"]; // kinds of lines that an axis spans
  const KEYS = "Arrow keys move along a line and between lines; plus and minus zoom, Escape shows all.";

  const element = (tag, properties, ...children) => {
    const { dataset, ...others } = properties || {};
    const made = Object.assign(document.createElement(tag), others);
    Object.assign(made.dataset, dataset);
    made.append(...children);
    return made;
  };
  const turned = new Map();
  const table = at => { // a list of columns
    if (typeof at === "number") return shared[at];
    if (!turned.has(at)) {
      const columns = shared[parseInt(at)];
      turned.set(at, columns[0].map((_, i) => columns.map(column => column[i])));
    }
    return turned.get(at);
  };
  const isNear = (a, b) => Math.abs(a - b) <= 1e-9 * Math.max(1, Math.abs(a), Math.abs(b));

  // --- numbers in words ---
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 6 });
  const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const isTiny = value => value !== 0 && Math.abs(value) < 1e-4;
  const short = value => isTiny(value) ? String(+value.toPrecision(3)) : compact.format(value).toLowerCase();
  const full = value => isTiny(value) ? String(value) : plain.format(value);
  const rounded = value => +value.toPrecision(4);

  // --- ticks ---
  const even = (low, high, most) => {
    const least = (high - low) / Math.max(1, most);
    const power = 10 ** Math.floor(Math.log10(least));
    const unit = [1, 2, 5, 10].map(digit => digit * power).find(each => each >= least * 0.999);
    const ticks = [];
    for (let i = Math.ceil(low / unit - 1e-9); i * unit <= high + 1e-9 * unit; i++) ticks.push(+(i * unit).toPrecision(12));
    return ticks;
  };
  const decades = (low, high, most, digits) => {
    const ticks = [];
    for (let power = Math.floor(Math.log10(Math.max(low, 1e-300))); power <= Math.log10(high); power++)
      for (const digit of digits) ticks.push(+`${digit}e${power}`);
    return ticks.filter(tick => tick >= low && tick <= high);
  };
  const logarithmic = (low, high, most) => {
    for (const digits of [[1, 2, 5], [1]]) {
      const ticks = decades(low, high, most, digits);
      if (ticks.length <= most) return ticks.length > 1 ? ticks : even(low, high, most);
    }
    const ticks = decades(low, high, most, [1]);
    return ticks.filter((_, i) => i % Math.ceil(ticks.length / most) === 0);
  };

  // --- the lines of a panel, on common abscissae ---
  const linesOf = panel => {
    const over = panel.x.over;
    const places = lines => over === "layer" ? shared[lines.at].map((_, i) => i) : shared[lines.at];
    const xs = [...new Set(panel.lines.flatMap(places))].sort((a, b) => a - b);
    const index = new Map(xs.map((x, i) => [x, i]));
    const made = [];
    for (const lines of panel.lines) {
      const at = places(lines);
      const isOff = over === "layer" ? shared[lines.at].map(name => view.off.layer.has(name)) : [];
      const aligned = column => {
        const values = new Array(xs.length); // undefined where a line has no place, null where it has a gap
        at.forEach((x, i) => { values[index.get(x)] = isOff[i] ? null : column[i]; });
        return values;
      };
      const [names, colours, dashes] = [lines.names, lines.colours, lines.dashes].map(each => shared[each]);
      const errors = "errors" in lines ? table(lines.errors) : [];
      table(lines.values).forEach((column, i) => {
        if (view.off[lines.kind] && view.off[lines.kind].has(names[i])) return;
        const { kind, width, marks } = lines;
        made.push({
          kind, width, name: names[i], colour: colours[i % colours.length], dash: dashes[i % dashes.length],
          mark: marks && marks[i % marks.length], values: aligned(column), errors: errors[i] && aligned(errors[i]),
        });
      });
    }
    return { xs, lines: made };
  };
  const isChosen = panel => {
    const has = kind => panel.lines.some(lines => lines.kind === kind);
    return (view.off.layer.size && (panel.x.over === "layer" || has("layer"))) || (view.off.run.size && has("run"));
  };
  const wholeRange = (panel, xs) => {
    const [first, last] = [xs[0], xs[xs.length - 1]];
    if (panel.x.over === "depth") return [-0.02, 1.02];
    const margin = panel.x.over === "layer" ? 0.04 * (last - first) : 0;
    return first === last ? [first - 0.5, last + 0.5] : [first - margin, last + margin];
  };
  // As in the picture, unless there is another choice: then what is shown of it, without what lies far from the blocks.
  const valueRange = (panel, xs, lines, within) => {
    const [low, high] = panel.y.range;
    const wantsLog = view.values ? view.values === "log" : panel.y.isLog;
    const inside = [];
    for (const line of lines.filter(each => MAIN.includes(each.kind)))
      line.values.forEach((value, i) => {
        if (value == null || xs[i] < within[0] || xs[i] > within[1]) return;
        if (isChosen(panel) || (value >= low && value <= high)) inside.push(value);
      });
    const shown = wantsLog ? inside.filter(value => value > 0) : inside;
    const isLog = wantsLog && (shown.length > 0 || low > 0);
    const isPicture = !isChosen(panel) && !view.zoom[panel.x.over] && (low > 0 || !isLog);
    if (isPicture || !shown.length) return { isLog, range: isLog && low <= 0 ? [high / 1000, high] : [low, high] };
    const [forth, back] = isLog ? [Math.log10, x => 10 ** x] : [x => x, x => x];
    const ends = [Math.min(...shown), Math.max(...shown)].map(forth);
    const margin = 0.06 * (ends[1] - ends[0]) || 0.1 * Math.abs(ends[1]) || 0.5;
    return { isLog, range: [back(ends[0] - margin), back(ends[1] + margin)] };
  };

  // --- a figure in place of its picture ---
  const plots = new Map(); // by the element around the picture
  const swatch = line => {
    const made = element("span", { className: "swatch" });
    made.innerHTML = `<svg width="24" height="8" aria-hidden="true"><path d="M0 4h24" fill="none"/></svg>`;
    const path = made.querySelector("path");
    path.setAttribute("stroke", line.colour);
    path.setAttribute("stroke-width", line.kind === "earlier" ? 7 : line.width);
    if (line.kind === "earlier") path.setAttribute("opacity", 0.4);
    path.setAttribute("stroke-dasharray", line.dash.join(" "));
    return made;
  };
  const legendOf = drawn => {
    const entries = new Map();
    for (const { panel, lines, range } of drawn) {
      for (const kind of ["layer", "step"]) {
        const family = lines.filter(line => line.kind === kind);
        const norm = family.find(line => line.dash.length);
        if (norm) entries.set("norm", element("span", {}, swatch(norm), "norm"));
        if (family.length < 2) continue;
        const strip = element("span", { className: "strip" });
        strip.style.background = `linear-gradient(90deg, ${family.map(line => line.colour).join()})`;
        entries.set(kind, element("span", {}, family[0].name, strip, family[family.length - 1].name));
      }
      for (const line of lines.filter(each => !["layer", "step", "expected"].includes(each.kind))) {
        const values = line.values.filter(value => value != null);
        const [least, most] = [Math.min(...values), Math.max(...values)];
        const name = line.kind === "earlier" ? line.name.replace(/, (low|high)est$/, "") : line.name;
        const isAway = line.kind === "random" && values.length && (least > range[1] || most < range[0]);
        const text = isAway ? `${name}: ${short(least)} ${least > range[1] ? "↑" : "↓"}` : name;
        if (name && !entries.has(name)) entries.set(name, element("span", {}, swatch(line), text));
      }
      const expected = lines.find(line => line.kind === "expected");
      if (expected) entries.set("expected", element("span", {}, swatch(expected), expected.name.split(", ")[0]));
    }
    return [...entries.values()];
  };
  const beyond = (panel, xs, lines, range) => {
    const values = new Map();
    const keep = (name, value) => value != null && values.set(name, [...(values.get(name) || []), value]);
    for (const line of lines.filter(each => ["layer", "step", "last"].includes(each.kind)))
      line.values.forEach((value, i) => keep(line.kind === "layer" ? line.name : shared[panel.lines[0].at][xs[i]], value));
    return [["↑", value => value > range[1]], ["↓", value => value < range[0]]].map(([arrow, isOut]) => {
      const out = [...values].map(([name, all]) => [name, all.filter(isOut)]).filter(([, all]) => all.length);
      const words = out.slice(0, 2).map(([name, all]) =>
        `${name} ${[...new Set([Math.min(...all), Math.max(...all)].map(rounded).map(short))].join(" to ")}`);
      const more = out.length > 2 ? ` and ${out.length - 2} more` : "";
      return out.length ? `${arrow} beyond: ${words.join(", ")}${more}` : "";
    });
  };
  const shade = (u, xs, line, low, high, alpha) => {
    const { ctx, bbox } = u;
    const ends = xs.map((x, i) => [x, low(i), high(i)]).filter(([, a]) => a !== undefined);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.beginPath();
    for (let i = 0; i < ends.length;) {
      const start = i;
      while (i < ends.length && Number.isFinite(ends[i][1])) i++;
      const part = ends.slice(start, i++);
      const path = [...part.map(([x, , b]) => [x, b]), ...part.reverse().map(([x, a]) => [x, a])];
      path.forEach(([x, y], at) => ctx[at ? "lineTo" : "moveTo"](u.valToPos(x, "x", true), u.valToPos(y, "y", true)));
    }
    ctx.globalAlpha = alpha;
    ctx.fillStyle = line.colour;
    ctx.fill();
    ctx.restore();
  };
  const drawPanel = (plot, panel, box) => {
    const { xs, lines } = linesOf(panel);
    const over = panel.x.over;
    const isLogX = over === "step" && xs[0] >= 0 && (view.steps ? view.steps === "log" : panel.x.isLog);
    const whole = wholeRange(panel, xs);
    const within = view.zoom[over] || whole;
    const { isLog, range } = valueRange(panel, xs, lines, within);
    const drawn = { panel, xs, lines, range, whole, within, isLogX };
    const labels = over === "layer" ? shared[panel.lines[0].labels] : [];
    const named = over === "layer" ? shared[panel.lines[0].at] : [];
    drawn.place = i => over === "layer" ? named[xs[i]] : `${over} ${over === "step" ? xs[i].toLocaleString("en") : xs[i]}`;
    const ticks = (low, high) => {
      const most = Math.max(2, Math.floor(box.clientWidth / 75));
      if (over !== "layer") return isLogX ? stepTicks(low, high, most) : even(low, high, most);
      const shown = labels.map((_, i) => i).filter(i => labels[i] && i >= low && i <= high);
      const longest = Math.max(...labels.map(label => label.length));
      const every = Math.ceil(shown.length / Math.max(2, Math.floor(box.clientWidth / (24 + 6 * longest))));
      return shown.filter((_, at) => at % every === 0);
    };
    const stepTicks = (low, high, most) => {
      const first = low <= 0 ? [0] : [];
      return [...first, ...logarithmic(Math.max(low, 1), high, most - first.length)];
    };
    const bands = u => {
      const isSpanned = line => line.kind === "run";
      const alpha = Math.max(0.06, Math.min(0.2, over === "depth" || lines.some(isSpanned) ? 0.5 / lines.length : 0.2));
      for (const line of lines.filter(each => each.errors)) {
        const end = sign => i => line.values[i] == null ? (isSpanned(line) ? undefined : line.values[i])
          : line.errors[i] == null ? null : line.values[i] + sign * line.errors[i];
        shade(u, xs, line, end(-1), end(1), alpha);
      }
      const ends = lines.filter(line => line.kind === "earlier");
      for (let i = 0; i + 1 < ends.length; i += 2)
        shade(u, xs, ends[i], at => ends[i].values[at], at => ends[i + 1].values[at], 0.3);
    };
    const axis = { stroke: "#000", font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif" };
    Object.assign(axis, { grid: { stroke: "#e6e6e6", width: 1 }, ticks: { stroke: "#000", width: 1, size: 4 }, gap: 3 });
    const words = { step: `optimizer step${isLogX ? " (log scale)" : ""}`, layer: "layer", depth: "relative depth (1: last block)" };
    box.textContent = "";
    const u = new uPlot({
      width: box.clientWidth, height: box.clientHeight, legend: { show: false }, padding: [8, 10, 0, 0],
      focus: { alpha: 0.25 },
      scales: {
        x: { time: false, range: () => within, ...(isLogX && { distr: 100, fwd: Math.log1p, bwd: Math.expm1 }) },
        y: { range: () => range, distr: isLog ? 3 : 1 },
      },
      axes: [
        { ...axis, size: 20, label: words[over], labelSize: 15, labelGap: 0, splits: (_, __, low, high) => ticks(low, high),
          values: (_, at) => at.map(x => over === "layer" ? labels[x] : short(x)) },
        { ...axis, size: 40, values: (_, at) => at.map(short), splits: (_, __, low, high) =>
          (isLog ? logarithmic : even)(low, high, Math.max(2, Math.floor(box.clientHeight / 32))) },
      ],
      series: [{}, ...lines.map(line => ({
        stroke: line.colour, width: line.width, dash: line.dash, spanGaps: line.kind === "run",
        points: { show: line.mark != null, size: line.kind === "run" ? 5 : 4, width: 1, stroke: line.colour,
          fill: line.mark ? "#fff" : line.colour },
      }))],
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => zoom(over) } },
      hooks: {
        drawAxes: [bands],
        setCursor: [self => self.cursor.left < 0 ? leave(plot) : nearest(plot, drawn)],
        setSelect: [self => {
          const { left, width } = self.select;
          if (width < 4) return;
          zoom(over, [self.posToVal(left, "x"), self.posToVal(left + width, "x")]);
        }],
      },
    }, [xs, ...lines.map(line => line.values)], box);
    const dot = element("div", { className: "dot", hidden: true });
    const notes = beyond(panel, xs, lines, range).map((text, i) => element("div", { className: `beyond ${i ? "low" : "high"}` }, text));
    u.over.append(dot, ...notes.filter(note => note.textContent));
    return Object.assign(drawn, { u, dot });
  };
  const draw = plot => {
    const { at } = plot;
    plot.isDue = false;
    plot.drawn.forEach(({ u }) => u.destroy());
    plot.drawn = plot.figure.panels.map((panel, i) => drawPanel(plot, panel, plot.boxes[i]));
    plot.legend.replaceChildren(...legendOf(plot.drawn));
    plot.at = null;
    if (!at) return;
    const drawn = plot.drawn[at.panel];
    const line = drawn.lines.find(each => each.name === at.name && each.kind === at.kind);
    const i = drawn.xs.indexOf(at.x);
    if (line && line.values[i] != null && at.x >= drawn.within[0] && at.x <= drawn.within[1]) show(plot, drawn, line, i);
    else leave(plot);
  };

  // --- the value that is pointed at ---
  const show = (plot, drawn, line, i) => {
    const { u, dot, panel, lines, xs } = drawn;
    plot.at = { panel: plot.drawn.indexOf(drawn), name: line.name, kind: line.kind, x: xs[i], line, i };
    const [left, top] = [u.valToPos(xs[i], "x"), u.valToPos(line.values[i], "y")];
    plot.drawn.forEach(each => { each.dot.hidden = each !== drawn; });
    Object.assign(dot.style, { left: `${left}px`, top: `${top}px`, borderColor: line.colour });
    const error = line.errors && line.errors[i] != null ? ` ± ${full(line.errors[i])}` : "";
    const what = plot.drawn.length > 1 ? `${panel.y.name} ` : "";
    const text = `${[line.name, drawn.place(i)].filter(Boolean).join(", ")}: ${what}${full(line.values[i])}${error}`;
    if (plot.readout.textContent !== text) plot.readout.textContent = text;
    plot.root.classList.add("pointed");
    u.setSeries(lines.indexOf(line) + 1, { focus: true }, false);
  };
  const leave = plot => {
    if (!plot.at) return;
    plot.at = null;
    plot.root.classList.remove("pointed");
    plot.readout.textContent = "";
    plot.drawn.forEach(({ u, dot }) => { dot.hidden = true; u.setSeries(null, { focus: false }, false); });
  };
  const isShown = ({ xs, within }, line, i) => line.values[i] != null && xs[i] >= within[0] && xs[i] <= within[1];
  const nearest = (plot, drawn) => {
    const { u, xs, lines } = drawn;
    const { left, top } = u.cursor;
    const middle = u.posToIdx(left);
    let best;
    for (const line of lines)
      for (let away = 0, found = false; away < xs.length && !found; away++)
        for (const i of new Set([middle - away, middle + away])) {
          if (!isShown(drawn, line, i)) continue;
          found = true;
          const y = Math.max(0, Math.min(u.over.clientHeight, u.valToPos(line.values[i], "y")));
          const distance = Math.hypot(u.valToPos(xs[i], "x") - left, y - top);
          if (!best || distance < best.distance) best = { distance, line, i };
        }
    if (best) show(plot, drawn, best.line, best.i);
  };
  const move = (plot, along, up) => {
    const drawn = plot.drawn[plot.at ? plot.at.panel : 0];
    const { xs, lines } = drawn;
    const start = lines.find(line => ["mean", "last", "run"].includes(line.kind)) || lines[0];
    if (!start) return;
    const { line, i } = plot.at || { line: start, i: along > 0 ? -1 : xs.length };
    if (up && plot.at) {
      const beside = lines.filter(each => isShown(drawn, each, i)).sort((a, b) => a.values[i] - b.values[i]);
      const next = beside[beside.indexOf(line) + up];
      if (next) show(plot, drawn, next, i);
      return;
    }
    const places = xs.map((_, at) => at).filter(at => isShown(drawn, line, at));
    const next = along < 0 ? places.filter(at => at < i).pop() : places.find(at => at > i);
    const panel = plot.drawn.indexOf(drawn) + along;
    if (next !== undefined) show(plot, drawn, line, Math.abs(along) > 1 ? places[along > 0 ? places.length - 1 : 0] : next);
    else if (plot.drawn[panel] && Math.abs(along) === 1) {
      const other = plot.drawn[panel].lines.find(each => each.name === line.name);
      if (other) show(plot, plot.drawn[panel], other, other.values.findIndex((_, at) => isShown(plot.drawn[panel], other, at)));
    }
  };
  const zoomBy = (plot, factor) => {
    const { within, whole, isLogX, panel } = plot.drawn[plot.at ? plot.at.panel : 0];
    const [forth, back] = isLogX ? [Math.log1p, Math.expm1] : [x => x, x => x];
    const [low, high] = within.map(forth);
    const middle = plot.at ? forth(plot.at.x) : (low + high) / 2;
    const ends = [middle - (middle - low) * factor, middle + (high - middle) * factor].map(back);
    zoom(panel.x.over, [Math.max(whole[0], ends[0]), Math.min(whole[1], ends[1])], whole);
  };
  const press = (plot, event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1], Home: [-2, 0], End: [2, 0] };
    const { key } = event;
    if (moves[key]) move(plot, ...moves[key]);
    else if (key === "+" || key === "=") zoomBy(plot, 0.5);
    else if (key === "-") zoomBy(plot, 2);
    else if (key === "Escape" || key === "0") zoom(plot.figure.panels[0].x.over);
    else return;
    event.preventDefault();
  };

  const make = host => {
    const figure = figures[host.dataset.plot];
    const boxes = figure.panels.map(() => element("div", { className: "canvas" }));
    const [readout, legend] = [element("p", { className: "readout" }), element("p", { className: "legend" })];
    readout.setAttribute("aria-live", "polite");
    const head = element("p", { className: "title" }, element("strong", {}, figure.title));
    const unit = element("p", { className: "unit" }, figure.unit);
    const root = element("div", { className: "plot", tabIndex: 0 }, head, unit, readout, legend,
      element("div", { className: "canvases" }, ...boxes));
    root.setAttribute("role", "application");
    root.setAttribute("aria-label", `${host.querySelector("img").alt} ${KEYS}`);
    host.append(root);
    host.classList.add("live");
    const plot = { figure, root, boxes, readout, legend, drawn: [], at: null };
    root.addEventListener("keydown", event => press(plot, event));
    root.addEventListener("focus", () => { if (root.matches(":focus-visible") && !plot.at) move(plot, -1, 0); });
    root.addEventListener("blur", () => leave(plot));
    new ResizeObserver(() => { if (root.clientWidth) draw(plot); }).observe(root); // also draws it first
    return plot;
  };
  const seen = new IntersectionObserver(entries => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && !plots.has(target)) plots.set(target, make(target));
      const plot = plots.get(target);
      if (!plot) continue;
      plot.isSeen = isIntersecting;
      if (isIntersecting && plot.isDue) draw(plot);
    }
  }, { rootMargin: "300px" });

  // --- one choice for all figures, in the address and in the controls ---
  const readAddress = () => {
    const given = new URLSearchParams(location.hash.split("&").slice(1).join("&"));
    for (const key of ["values", "steps"]) view[key] = ["log", "linear"].includes(given.get(key)) ? given.get(key) : "";
    for (const [kind, names] of Object.entries(known)) {
      const only = given.getAll(`only-${kind}`);
      const without = given.getAll(`without-${kind}`);
      view.off[kind] = new Set([...names.keys()].filter(name => only.length ? !only.includes(name) : without.includes(name)));
    }
    view.zoom = {};
    for (const over of ["step", "layer", "depth"]) {
      const ends = (given.get(over) || "").split("..").map(parseFloat);
      if (ends.length === 2 && ends[0] < ends[1]) view.zoom[over] = ends;
    }
  };
  const writeAddress = () => {
    const kept = new URLSearchParams();
    for (const key of ["values", "steps"]) if (view[key]) kept.set(key, view[key]);
    for (const [kind, off] of Object.entries(view.off)) {
      const on = [...known[kind].keys()].filter(name => !off.has(name));
      const isShorter = on.length && on.length < off.size;
      for (const name of isShorter ? on : off) kept.append(`${isShorter ? "only" : "without"}-${kind}`, name);
    }
    for (const [over, ends] of Object.entries(view.zoom)) kept.set(over, ends.join(".."));
    const hash = location.hash.slice(1).split("&")[0] + (kept.size === 0 || !`${kept}` ? "" : `&${kept}`);
    history.replaceState(null, "", hash ? `#${hash}` : location.href.split("#")[0]);
  };
  const controls = [];
  const refresh = () => {
    controls.forEach(update => update());
    for (const plot of plots.values()) {
      plot.isDue = true;
      if (plot.isSeen) draw(plot);
    }
  };
  const change = () => {
    writeAddress();
    refresh();
  };
  const zoom = (over, ends, whole) => {
    const isWhole = !ends || (whole && ends.every((end, i) => isNear(end, whole[i])));
    if (isWhole) delete view.zoom[over];
    else if (rounded(ends[0]) < rounded(ends[1])) view.zoom[over] = ends.map(rounded);
    change();
  };
  const scale = (label, key) => {
    const options = [["", "as drawn"], ["linear", "linear"], ["log", "logarithmic"]];
    const select = element("select", {}, ...options.map(([value, text]) => element("option", { value }, text)));
    select.addEventListener("change", () => { view[key] = select.value; change(); });
    controls.push(() => { select.value = view[key]; });
    return element("label", {}, `${label} `, select);
  };
  const choice = (label, kind) => {
    const boxes = [...known[kind]].map(([name, colour]) => {
      const box = element("input", { type: "checkbox" });
      box.addEventListener("change", () => { view.off[kind][box.checked ? "delete" : "add"](name); change(); });
      controls.push(() => { box.checked = !view.off[kind].has(name); });
      return element("label", {}, box, swatch({ colour, width: 3, dash: [] }), name);
    });
    const all = (text, names) => {
      const button = element("button", { type: "button" }, text);
      button.addEventListener("click", () => { view.off[kind] = new Set(names); change(); });
      return button;
    };
    const summary = element("summary");
    controls.push(() => {
      const [total, off] = [known[kind].size, view.off[kind].size];
      summary.textContent = `${label}: ${off ? `${total - off} of ${total}` : "all"}`;
    });
    const buttons = element("p", {}, all("All", []), " ", all("None", known[kind].keys()));
    const menu = element("details", { className: "choice" }, summary, element("div", { className: "menu" }, buttons, ...boxes));
    menu.addEventListener("keydown", event => {
      if (event.key !== "Escape") return;
      menu.open = false;
      summary.focus();
    });
    document.addEventListener("click", event => { if (!menu.contains(event.target)) menu.open = false; });
    return menu;
  };
  const steps = () => {
    const ends = [["Steps from ", 0], [" to ", 1]].map(([label, i]) => {
      const input = element("input", { type: "number", step: "any" });
      const whole = () => [extent.reduce((a, b) => Math.min(a, b)), extent.reduce((a, b) => Math.max(a, b))];
      input.addEventListener("change", () => {
        const asked = [...(view.zoom.step || whole())];
        asked[i] = input.value === "" ? whole()[i] : +input.value;
        zoom("step", asked, whole());
      });
      controls.push(() => { input.value = (view.zoom.step || whole())[i]; });
      return element("label", {}, label, input);
    });
    return element("span", { className: "ends" }, ...ends);
  };
  const makeControls = () => {
    const reset = element("button", { type: "button" }, "Reset");
    reset.addEventListener("click", () => {
      Object.assign(view, { values: "", steps: "", off: { layer: new Set(), run: new Set() }, zoom: {} });
      change();
    });
    const parts = [scale("Values", "values")];
    if (extent.length) parts.push(scale("Steps", "steps"), steps());
    if (known.layer.size > 1) parts.push(choice("Layers", "layer"));
    if (known.run.size > 1) parts.push(choice("Runs", "run"));
    const bar = element("details", { className: "controls", open: innerWidth > 640 },
      element("summary", {}, "View of all figures"), element("div", {}, ...parts, reset));
    const main = document.querySelector("main");
    main.prepend(bar);
  };

  for (const panel of panels)
    for (const lines of panel.lines) {
      const [names, colours] = [shared[lines.names], shared[lines.colours]];
      const of = known[lines.kind];
      if (of) names.forEach((name, i) => name && of.set(name, of.get(name) || colours[i % colours.length]));
      if (panel.x.over === "layer") shared[lines.at].forEach(name => name && known.layer.set(name, known.layer.get(name) || "#777777"));
    }
  readAddress();
  makeControls();
  refresh();
  document.querySelectorAll("[data-plot]").forEach(host => seen.observe(host));
  addEventListener("hashchange", () => {
    if (location.hash.includes("&")) { // an address that was given
      readAddress();
      refresh();
    }
    writeAddress();
  });
  const target = document.getElementById(location.hash.slice(1).split("&")[0]);
  if (target && location.hash.includes("&")) target.scrollIntoView();
})();
