// Nothing depends on this. Pointing at a category in a legend shows where it is; what is folded is printed, too.
const drawn = document.querySelectorAll("svg.stack, svg.timeline, svg.plot");
for (const key of document.querySelectorAll("[data-kind]")) {
  const show = (kind) => drawn.forEach((svg) => svg.querySelectorAll("[class^=c-]").forEach((each) => each.classList.toggle("faint", kind && !each.classList.contains(kind))));
  key.addEventListener("pointerenter", () => show(key.dataset.kind));
  key.addEventListener("pointerleave", () => show(""));
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));

// The timeline of nodes: closer, and along.
const make = (name, attributes, text) => {
  const made = document.createElementNS(drawn[0].namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 15e3, 3e4, 6e4, 12e4, 3e5, 6e5, 18e5, 36e5, 72e5, 216e5, 432e5, 864e5];

function zoomable(svg) {
  const exact = JSON.parse(svg.dataset.exact), {length, left, width} = exact;
  const region = svg.parentElement, ticks = svg.querySelector(".ticks"), height = svg.viewBox.baseVal.height;
  const intervals = [];
  for (let n = 0, t = 0; n < exact.intervals.length; n += 3)
    intervals.push([(t += exact.intervals[n]), (t += exact.intervals[n + 1]), exact.kinds[exact.intervals[n + 2]]]);
  const lanes = [...svg.querySelectorAll(".lane")].map((lane, n) => ({lane, whole: [...lane.childNodes], ranges: exact.lanes[n]}));
  const flags = [...svg.querySelectorAll(".at")].map((flag) => ({flag, at: +flag.dataset.ms, x: +flag.dataset.x}));
  const allTicks = [...ticks.childNodes];
  let from = 0, to = length;
  const bar = document.createElement("div"), detail = document.createElement("span");
  bar.className = "zoom";
  detail.setAttribute("role", "status");
  const clock = (t) => new Date(exact.start + exact.zone + t).toISOString().slice(5, to - from < 2e4 ? 23 : 19).replace("T", " ");
  const place = (t) => left + (width * (t - from)) / (to - from);

  const bars = (ranges) => {
    const made = [];
    let free = 0;
    for (const [first, last] of ranges) for (let n = first; n < last; n++) {
      const [begin, end, kind] = intervals[n];
      if (end <= from || begin >= to) continue;
      const x = place(Math.max(begin, from)), wide = place(Math.min(end, to)) - x;
      if (wide < 0.3 && x < free) continue;
      free = x + Math.max(0.3, wide);
      const bar = make("rect", {class: kind, x, width: free - x, height: 14});
      bar.append(make("title", {}, `${kind.slice(2).replaceAll("_", " ")}, ${(end - begin) / 1e3} s from ${clock(begin)}`));
      made.push(bar);
    }
    return made;
  };
  const labels = () => {
    const step = STEPS.find((each) => (to - from) / each <= 9) || 864e5 * Math.ceil((to - from) / 864e5 / 9);
    const cut = step < 1e3 ? [11, 23] : step < 6e4 ? [11, 19] : step < 432e5 ? [11, 16] : [5, 16];
    const made = [], base = exact.start + exact.zone;
    for (let t = Math.ceil((base + from) / step) * step; t <= base + to; t += step) {
      const x = place(t - base);
      made.push(make("line", {class: "grid", x1: x, x2: x, y1: 4, y2: height}));
      made.push(make("text", {class: "time", x: x + 3, y: 13}, new Date(t).toISOString().slice(...cut).replace("T", " ")));
    }
    return made;
  };
  const show = (a, b) => {
    const span = Math.min(length, Math.max(20, b - a));
    from = Math.min(Math.max(0, a), length - span);
    to = from + span;
    const all = span === length;
    for (const {lane, whole, ranges} of lanes) lane.replaceChildren(...(all ? whole : bars(ranges)));
    ticks.replaceChildren(...(all ? allTicks : labels()));
    for (const {flag, at, x} of flags) {
      flag.style.display = at < from || at > to ? "none" : "";
      flag.setAttribute("transform", `translate(${place(at) - x} 0)`);
    }
    svg.classList.toggle("near", !all);
    detail.textContent = all ? "The whole run. Keys in the chart: + - ← → 0; Ctrl and wheel; drag" : `${clock(from)} to ${clock(to)}`;
  };
  const zoom = (by, share = 0.5) => {
    const at = from + share * (to - from), span = (to - from) / by;
    show(at - share * span, at + (1 - share) * span);
  };
  const move = (share) => show(from + share * (to - from), to + share * (to - from));
  const share = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.min(1, Math.max(0, (((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width - left) / width));
  };

  const keys = {
    "+": ["closer", () => zoom(2)], "-": ["wider", () => zoom(0.5)], ArrowLeft: ["earlier", () => move(-0.2)],
    ArrowRight: ["later", () => move(0.2)], 0: ["all", () => show(0, length)],
  };
  for (const key of ["+", "-", "ArrowLeft", "ArrowRight", "0"]) {
    const button = document.createElement("button");
    button.textContent = {ArrowLeft: "←", ArrowRight: "→", "-": "−", 0: "all"}[key] || key;
    button.setAttribute("aria-label", keys[key][0]);
    button.addEventListener("click", keys[key][1]);
    bar.append(button);
  }
  bar.append(detail);
  region.before(bar);
  region.addEventListener("keydown", (event) => {
    const key = event.key === "=" ? "+" : event.key;
    if (!keys[key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[key][1]();
  });
  // Without Ctrl the wheel scrolls the page, unless one has come here.
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !region.contains(document.activeElement)) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.5 : 1 / 1.5, share(event));
  }, {passive: false});
  let held = null;
  svg.addEventListener("pointerdown", (event) => (held = event.pointerType === "mouse" ? share(event) : null));
  addEventListener("pointerup", () => (held = null));
  svg.addEventListener("pointermove", (event) => {
    if (held !== null) {
      const now = share(event);
      move(held - now);
      held = now;
    } else tell(event);
  });
  const tell = (event) => {
    const title = event.target.closest("rect, .at")?.querySelector("title");
    const row = event.target.closest(".lane")?.previousElementSibling.querySelector("title").textContent;
    if (title) detail.textContent = row ? `${row}: ${title.textContent}` : title.textContent;
  };
  svg.addEventListener("focusin", tell);
  svg.addEventListener("click", tell);
  show(0, length);
}
document.querySelectorAll("svg.timeline").forEach(zoomable);
