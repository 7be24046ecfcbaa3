// Draws the figures of a report over steps and depth again, from their numbers, so that they answer.
// Lines that are off, scales and zoom are one choice for all figures, and the address keeps it after an "&".
(() => {
  "use strict";
  const { shared, figures } = JSON.parse(document.getElementById("plots").textContent);
  const view = { values: "", steps: "", off: { layer: new Set(), run: new Set() }, zoom: {} };
  const WHOLE = Array.from({ length: 48 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3)); // between steps
  const MAIN = ["layer", "step", "run", "last"]; // kinds of lines that an axis spans
  const KEYS = "Arrow keys move along a line and between lines; plus and minus zoom, Escape shows all.";

  const element = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };

  // --- numbers in words ---
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 6 });
  const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const isTiny = value => value !== 0 && Math.abs(value) < 1e-4;
  const short = value => isTiny(value) ? String(+value.toPrecision(3)) : compact.format(value).toLowerCase();
  const full = value => isTiny(value) ? String(value) : plain.format(value);
  const rounded = value => +value.toPrecision(4);

  // Powers of ten, or those with 2 and 5, or what else is given, so that there are some ticks; 0 where that is inside.
  const logTicks = (low, high, most, others) => {
    const powers = Array.from({ length: 601 }, (_, k) => k - 300);
    const round = [[1], [1, 2, 5]].map(digits => [0, ...powers.flatMap(power => digits.map(digit => +`${digit}e${power}`))]);
    if (others.length && low < 1) round.forEach((each, i) => { round[i] = each.filter(x => x === 0 || x >= 1); });
    const inside = [...round, others].map(each => each.filter(x => x >= low && x <= high));
    const ticks = inside.find(each => each.length > 2) || inside[1];
    return ticks.filter((_, i) => i % Math.ceil(ticks.length / most) === 0);
  };

  // --- the lines of a figure, on common abscissae ---
  const linesOf = figure => {
    const over = figure.x.over;
    const places = lines => over === "layer" ? shared[lines.at].map((_, i) => i) : shared[lines.at];
    const xs = [...new Set(figure.lines.flatMap(places))].sort((a, b) => a - b);
    const index = new Map(xs.map((x, i) => [x, i]));
    const made = [];
    for (const lines of figure.lines) {
      const at = places(lines);
      const isOff = over === "layer" ? shared[lines.at].map(name => view.off.layer.has(name)) : [];
      const aligned = column => {
        const values = new Array(xs.length); // undefined where a line has no place, null where it has a gap
        at.forEach((x, i) => { values[index.get(x)] = isOff[i] ? null : column[i]; });
        return values;
      };
      const [names, colours, dashes] = [lines.names, lines.colours, lines.dashes].map(each => shared[each]);
      const errors = "errors" in lines ? shared[lines.errors] : [];
      shared[lines.values].forEach((column, i) => {
        if (view.off[lines.kind] && view.off[lines.kind].has(names[i])) return;
        const { kind, width, marks } = lines;
        made.push({
          kind, width, name: names[i], colour: colours[i % colours.length], dash: dashes[i % dashes.length],
          mark: marks, values: aligned(column), errors: errors[i] && aligned(errors[i]),
        });
      });
    }
    return { xs, lines: made };
  };
  const isChosen = figure => {
    const has = kind => figure.lines.some(lines => lines.kind === kind);
    return (view.off.layer.size && (figure.x.over === "layer" || has("layer"))) || (view.off.run.size && has("run"));
  };
  const wholeRange = (figure, xs) => {
    const [first, last] = [xs[0], xs[xs.length - 1]];
    if (figure.x.over === "depth") return [-0.02, 1.02];
    const margin = figure.x.over === "layer" ? 0.04 * (last - first) : 0;
    return first === last ? [first - 0.5, last + 0.5] : [first - margin, last + margin];
  };
  // As in the picture, unless there is another choice: then what is shown of it, without what lies far from the blocks.
  const valueRange = (figure, xs, lines, within) => {
    const [low, high] = figure.y.range;
    const wantsLog = view.values ? view.values === "log" : figure.y.isLog;
    const inside = [];
    for (const line of lines.filter(each => MAIN.includes(each.kind)))
      line.values.forEach((value, i) => {
        if (value == null || xs[i] < within[0] || xs[i] > within[1]) return;
        if (isChosen(figure) || (value >= low && value <= high)) inside.push(value);
      });
    const shown = wantsLog ? inside.filter(value => value > 0) : inside;
    const isLog = wantsLog && (shown.length > 0 || low > 0);
    const isPicture = !isChosen(figure) && !view.zoom[figure.x.over] && (low > 0 || !isLog);
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
    made.innerHTML = `<svg width="17" height="8" aria-hidden="true"><path d="M0 4h17"/></svg>`;
    const path = made.querySelector("path");
    path.setAttribute("stroke", line.colour);
    path.setAttribute("stroke-width", line.kind === "earlier" ? 7 : line.width);
    if (line.kind === "earlier") path.setAttribute("opacity", 0.4);
    path.setAttribute("stroke-dasharray", line.dash.join(" "));
    return made;
  };
  const legendOf = ({ lines, range }) => {
    const entries = new Map();
    for (const kind of ["layer", "step"]) {
      const family = lines.filter(line => line.kind === kind);
      if (family.length < 2) continue;
      const strip = element("span", { className: "strip" });
      strip.style.background = `linear-gradient(90deg, ${family.map(line => line.colour).join()})`;
      entries.set(kind, element("span", {}, family[0].name, strip, family[family.length - 1].name));
    }
    for (const line of lines.filter(each => !["layer", "step"].includes(each.kind))) {
      const values = line.values.filter(value => value != null);
      const [least, most] = [Math.min(...values), Math.max(...values)];
      const name = { earlier: line.name.replace(/, (low|high)est$/, ""), all: "all rows" }[line.kind] || line.name;
      const isAway = line.kind === "gaussian" && values.length && (least > range[1] || most < range[0]);
      const text = isAway ? `${name}: ${short(least)} ${least > range[1] ? "↑" : "↓"}` : name;
      if (name && !entries.has(name)) entries.set(name, element("span", {}, swatch(line), text));
    }
    return [...entries.values()];
  };
  const beyond = ({ figure, over, xs, lines, range }) => {
    const values = new Map(); // by layer
    for (const line of lines.filter(each => ["layer", "step", "last"].includes(each.kind)))
      line.values.forEach((value, i) => {
        const layer = over === "layer" ? shared[figure.lines[0].at][xs[i]] : line.name;
        if (value != null) values.set(layer, [...(values.get(layer) || []), value]);
      });
    const note = (arrow, isOut) => {
      const out = [...values].map(([layer, all]) => [layer, all.filter(isOut)]).filter(([, all]) => all.length);
      const spans = out.slice(0, 2).map(([layer, all]) => {
        const ends = [Math.min(...all), Math.max(...all)].map(value => short(+value.toPrecision(3)));
        return `${layer} ${[...new Set(ends)].join(" to ")}`;
      });
      const text = `${arrow} beyond: ${spans.join(", ")}${out.length > 2 ? ` and ${out.length - 2} more` : ""}`;
      return out.length ? [element("span", { className: "beyond" }, text)] : [];
    };
    return [...note("↑", value => value > range[1]), ...note("↓", value => value < range[0])];
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
  const prepared = figure => {
    const { xs, lines } = linesOf(figure);
    const { over } = figure.x;
    const isLogX = over === "step" && xs[0] >= 0 && (view.steps ? view.steps === "log" : figure.x.isLog);
    const whole = wholeRange(figure, xs);
    const within = view.zoom[over] || whole;
    return { figure, over, xs, lines, isLogX, whole, within, ...valueRange(figure, xs, lines, within) };
  };
  const drawBands = (u, { over, xs, lines }) => {
    const isRun = lines.some(line => line.kind === "run");
    for (const line of lines.filter(each => each.errors)) {
      const end = sign => i => line.values[i] == null ? (isRun ? undefined : line.values[i])
        : line.errors[i] == null ? null : line.values[i] + sign * line.errors[i];
      shade(u, xs, line, end(-1), end(1), isRun ? Math.max(0.06, Math.min(0.2, 0.5 / lines.length)) : 0.2);
    }
    const ends = lines.filter(line => line.kind === "earlier"); // lowest, highest, lowest, …
    for (let i = 0; i < ends.length; i += 2)
      shade(u, xs, ends[i], at => ends[i].values[at], at => ends[i + 1].values[at], 0.3);
  };
  const drawLines = (plot, drawn) => {
    const { box } = plot;
    const { figure, over, xs, lines, isLogX, within, isLog, range } = drawn;
    const labels = over === "layer" ? shared[figure.lines[0].labels] : [];
    const layerTicks = () => {
      const shown = xs.filter(x => labels[x] && x >= within[0] && x <= within[1]);
      const room = box.clientWidth / (24 + 6 * Math.max(...labels.map(label => label.length)));
      return shown.filter((_, at) => at % Math.ceil(shown.length / Math.max(2, Math.floor(room))) === 0);
    };
    const stepTicks = () => logTicks(...within, Math.max(3, box.clientWidth / 60), xs);
    const words = { step: `optimizer step${isLogX ? " (log scale)" : ""}`, layer: "layer", depth: "relative depth (1: last block)" };
    const font = "11px system-ui, sans-serif";
    const axis = {
      stroke: "#000", font, labelFont: font, labelSize: 15, labelGap: 0, gap: 3, filter: (_, ticks) => ticks,
      grid: { stroke: "#e6e6e6", width: 1 }, ticks: { stroke: "#000", width: 1, size: 4 },
      values: (_, ticks) => ticks.map(short),
    };
    box.textContent = "";
    drawn.u = new uPlot({
      width: box.clientWidth, height: box.clientHeight, legend: { show: false }, padding: [8, 10, 0, 0], focus: { alpha: 0.25 },
      scales: {
        x: { time: false, range: () => within, ...(isLogX && { distr: 100, fwd: Math.log1p, bwd: Math.expm1 }) },
        y: { range: () => range, distr: isLog ? 3 : 1 },
      },
      axes: [
        { ...axis, size: 20, label: words[over], space: 60, ...(over === "step" && { incrs: WHOLE }), ...(isLogX && { splits: stepTicks }),
          ...(over === "layer" && { splits: layerTicks, values: (_, ticks) => ticks.map(x => labels[x]) }) },
        { ...axis, size: (_, ticks) => 12 + 6.5 * Math.max(3, ...(ticks || []).map(text => text.length)), space: 30,
          ...(isLog && { splits: () => logTicks(...range, box.clientHeight / 25, []) }) },
      ],
      series: [{}, ...lines.map(({ kind, colour, width, dash, mark }) => ({
        stroke: colour, width, dash: dash.map(length => length * devicePixelRatio), spanGaps: kind === "run", pxAlign: 0,
        points: { show: Boolean(mark), size: kind === "run" ? 5 : 4, width: 1, stroke: colour, fill: colour },
      }))],
      cursor: { y: false, points: { show: false }, drag: { setScale: false }, bind: { dblclick: () => () => zoom(over) } },
      hooks: {
        drawAxes: [u => drawBands(u, drawn)],
        setCursor: [u => u.cursor.left >= 0 && nearest(plot)],
        setSelect: [({ select: { left, width }, posToVal }) => {
          if (width <= 3) return;
          leave(plot); // or its mark would stand where the pointer is not
          zoom(over, [posToVal(left, "x"), posToVal(left + width, "x")]);
        }],
      },
    }, [xs, ...lines.map(line => line.values)], box);
    drawn.dot = element("div", { className: "dot", hidden: true });
    drawn.u.over.append(drawn.dot);
  };
  const draw = plot => {
    const { at } = plot;
    plot.isDue = false;
    if (plot.drawn) plot.drawn.u.destroy();
    const drawn = plot.drawn = prepared(plot.figure);
    plot.legend.replaceChildren(...legendOf(drawn), ...beyond(drawn));
    drawLines(plot, drawn);
    leave(plot);
    const line = at && drawn.lines.find(each => each.name === at.name && each.kind === at.kind);
    const i = at && drawn.xs.indexOf(at.x);
    if (line && isShown(drawn, line, i)) show(plot, line, i);
  };

  // --- the value that is pointed at ---
  const show = (plot, line, i) => {
    const { u, dot, figure, over, lines, xs } = plot.drawn;
    plot.at = { name: line.name, kind: line.kind, x: xs[i], line, i };
    const [left, top] = [u.valToPos(xs[i], "x"), u.valToPos(line.values[i], "y")];
    dot.hidden = false;
    Object.assign(dot.style, { left: `${left}px`, top: `${top}px`, borderColor: line.colour });
    const error = line.errors && line.errors[i] != null ? ` ± ${full(line.errors[i])}` : "";
    const place = over === "layer" ? shared[figure.lines[0].at][xs[i]] : `${over} ${xs[i].toLocaleString("en")}`;
    const text = `${[line.name, place].filter(Boolean).join(", ")}: ${full(line.values[i])}${error}`;
    if (plot.readout.textContent !== text) plot.readout.textContent = text;
    plot.root.classList.add("pointed");
    u.setSeries(lines.indexOf(line) + 1, { focus: true }, false);
  };
  const leave = plot => {
    if (!plot.at) return;
    plot.at = null;
    plot.root.classList.remove("pointed");
    plot.readout.textContent = "";
    plot.drawn.dot.hidden = true;
    plot.drawn.u.setSeries(null, { focus: false }, false);
  };
  const isShown = ({ xs, within }, line, i) => line.values[i] != null && xs[i] >= within[0] && xs[i] <= within[1];
  const nearest = plot => {
    const { drawn } = plot;
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
          if (!best || distance <= best.distance) best = { distance, line, i };
        }
    if (best) show(plot, best.line, best.i);
  };
  const move = (plot, along, up) => {
    const { drawn } = plot;
    const { xs, lines } = drawn;
    const start = lines.find(line => ["mean", "last", "run"].includes(line.kind)) || lines[0];
    if (!start) return;
    const { line, i } = plot.at || { line: start, i: along > 0 ? -1 : xs.length };
    if (up && plot.at) {
      const beside = lines.filter(each => isShown(drawn, each, i)).sort((a, b) => a.values[i] - b.values[i]);
      const next = beside[beside.indexOf(line) + up];
      if (next) show(plot, next, i);
      return;
    }
    const places = xs.map((_, at) => at).filter(at => isShown(drawn, line, at));
    const next = along < 0 ? places.filter(at => at < i).pop() : places.find(at => at > i);
    if (next !== undefined) show(plot, line, Math.abs(along) > 1 ? places[along > 0 ? places.length - 1 : 0] : next);
  };
  const zoomBy = (plot, factor) => {
    const { within, whole, isLogX, over } = plot.drawn;
    const [forth, back] = isLogX ? [Math.log1p, Math.expm1] : [x => x, x => x];
    const [low, high] = within.map(forth);
    const middle = plot.at ? forth(plot.at.x) : (low + high) / 2;
    const ends = [middle - (middle - low) * factor, middle + (high - middle) * factor].map(back);
    zoom(over, ends, whole);
  };
  const press = (plot, event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1], Home: [-2, 0], End: [2, 0] };
    const { key } = event;
    if (moves[key]) move(plot, ...moves[key]);
    else if (key === "+" || key === "=") zoomBy(plot, 0.5);
    else if (key === "-") zoomBy(plot, 2);
    else if (key === "Escape" || key === "0") zoom(plot.figure.x.over);
    else return;
    event.preventDefault();
  };

  const make = host => {
    const figure = figures[host.dataset.plot];
    const box = element("div", { className: "canvas" });
    const [readout, legend] = [element("p", { className: "readout" }), element("p", { className: "legend" })];
    readout.setAttribute("aria-live", "polite");
    const head = element("p", { className: "title" }, element("strong", {}, figure.title));
    const unit = element("p", { className: "unit" }, figure.unit);
    const root = element("div", { className: "plot", tabIndex: 0 }, head,
      element("div", { className: "said" }, unit, readout), legend,
      element("div", { className: "canvases" }, box));
    root.setAttribute("role", "application");
    root.setAttribute("aria-label", `${host.querySelector("img").alt} ${KEYS}`);
    host.append(root);
    host.classList.add("live");
    const plot = { figure, root, box, readout, legend, drawn: null, at: null };
    root.addEventListener("keydown", event => press(plot, event));
    root.addEventListener("focus", () => { if (root.matches(":focus-visible") && !plot.at) move(plot, -1, 0); });
    for (const end of ["blur", "mouseleave"]) root.addEventListener(end, () => leave(plot));
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

  // --- one choice for all figures: a form, which the address keeps ---
  const form = document.getElementById("view");
  const fields = ["values", "steps"].filter(name => form.elements[name]);
  const boxesOf = kind => [...form.querySelectorAll(`[name=${kind}]`)];
  const readAddress = () => {
    const given = new URLSearchParams(location.hash.split("&").slice(1).join("&"));
    form.reset();
    for (const name of fields) form.elements[name].value = ["log", "linear"].find(each => each === given.get(name)) || "";
    for (const kind of Object.keys(view.off))
      for (const box of boxesOf(kind)) {
        const [only, without] = [given.getAll(`only-${kind}`), given.getAll(`without-${kind}`)];
        box.checked = only.length ? only.includes(box.value) : !without.includes(box.value);
      }
    view.zoom = {};
    for (const over of ["step", "layer", "depth"]) {
      const ends = (given.get(over) || "").split("..").map(parseFloat);
      if (ends.length === 2 && ends.every(Number.isFinite)) setZoom(over, ends);
    }
    refresh();
  };
  const writeAddress = () => {
    const kept = new URLSearchParams();
    for (const name of fields) if (view[name]) kept.set(name, view[name]);
    for (const [kind, off] of Object.entries(view.off)) {
      const on = boxesOf(kind).map(box => box.value).filter(name => !off.has(name));
      const isShorter = on.length && on.length < off.size;
      for (const name of isShorter ? on : off) kept.append(`${isShorter ? "only" : "without"}-${kind}`, name);
    }
    for (const [over, ends] of Object.entries(view.zoom)) kept.set(over, ends.join(".."));
    const hash = [location.hash.slice(1).split("&")[0], ...(`${kept}` ? [kept] : [])].join("&");
    history.replaceState(null, "", hash ? `#${hash}` : location.href.split("#")[0]);
  };
  const refresh = () => {
    for (const name of fields) view[name] = form.elements[name].value;
    for (const kind of Object.keys(view.off)) {
      const off = boxesOf(kind).filter(box => !box.checked);
      view.off[kind] = new Set(off.map(box => box.value));
      const count = form.querySelector(`[data-count=${kind}]`);
      if (count) count.textContent = off.length ? `${boxesOf(kind).length - off.length} of ${boxesOf(kind).length}` : "all";
    }
    for (const [i, name] of ["from", "to"].entries())
      if (form.elements[name]) form.elements[name].value = (view.zoom.step || wholeSteps())[i];
    for (const plot of plots.values()) {
      plot.isDue = true;
      if (plot.isSeen) draw(plot);
    }
    writeAddress();
  };
  const wholeSteps = () => ["from", "to"].map(name => +form.elements[name].defaultValue);
  const setZoom = (over, ends, whole = over === "step" && form.elements.from ? wholeSteps() : [-Infinity, Infinity]) => {
    const [low, high] = [Math.max(ends[0], whole[0]), Math.min(ends[1], whole[1])]; // a logarithm has no negative end
    const round = over === "step" ? Math.round : rounded;
    if (low === whole[0] && high === whole[1]) delete view.zoom[over];
    else if (round(low) < round(high)) view.zoom[over] = [low, high].map(round);
  };
  const zoom = (over, ends, whole) => {
    if (ends) setZoom(over, ends, whole);
    else delete view.zoom[over];
    refresh();
  };
  form.addEventListener("change", ({ target: { name } }) => {
    const asked = ["from", "to"].map((each, i) => form.elements[each] && (form.elements[each].value || wholeSteps()[i]));
    if (name === "from" || name === "to") zoom("step", asked.map(Number));
    else refresh();
  });
  form.addEventListener("click", ({ target: { name, value, type } }) => {
    if (type !== "button") return;
    if (name === "all") boxesOf(value).forEach(box => { box.checked = true; });
    else if (name === "none") boxesOf(value).forEach(box => { box.checked = false; });
    else {
      form.reset();
      view.zoom = {};
    }
    refresh();
  });
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("keydown", ({ key, target }) => {
    const menu = key === "Escape" && target.closest(".choice");
    if (!menu) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
  document.addEventListener("click", ({ target }) => {
    for (const menu of form.querySelectorAll(".choice")) if (!menu.contains(target)) menu.open = false;
  });
  addEventListener("hashchange", () => location.hash.includes("&") ? readAddress() : writeAddress());

  form.hidden = false;
  form.querySelector("details").open = innerWidth > 640;
  readAddress();
  document.querySelectorAll("[data-plot]").forEach(host => seen.observe(host));
  const target = document.getElementById(location.hash.slice(1).split("&")[0]);
  if (target && location.hash.includes("&")) target.scrollIntoView();
})();
