// Nothing depends on this. Pointing at a category in a legend shows where it is; what is folded is printed, too.
const drawn = document.querySelectorAll("svg.stack [class^=c-], svg.timeline [class^=c-], svg.plot [class^=c-]");
for (const key of document.querySelectorAll("[data-kind]")) {
  const show = (kind) => drawn.forEach((each) => each.classList.toggle("faint", kind && !each.classList.contains(kind)));
  key.addEventListener("pointerenter", () => show(key.dataset.kind));
  key.addEventListener("pointerleave", () => show(""));
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
