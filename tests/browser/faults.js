// What is wrong with the page for its readers, as a list of sentences: images, names, headings, keyboard, contrast.
const faults = [];
const shown = element => element.checkVisibility({ visibilityProperty: true });
const all = selector => [...document.querySelectorAll(selector)].filter(shown);
const brief = element => {
  const text = element.textContent.trim().replace(/\s+/g, " ").slice(0, 40);
  return `<${element.tagName.toLowerCase()}${element.id ? "#" + element.id : ""}>` + (text ? ` "${text}"` : "");
};
const name = element => {
  const by = (element.getAttribute("aria-labelledby") || "").split(/\s+/).map(id => document.getElementById(id));
  const labels = [...(element.labels || []), ...by.filter(Boolean)].map(label => label.textContent);
  const images = [...element.querySelectorAll("img[alt]")].map(image => image.alt);
  const title = element instanceof SVGElement ? element.querySelector("title") : null;
  return [element.getAttribute("aria-label"), element.title, title && title.textContent, ...labels, ...images,
    element instanceof SVGElement ? "" : element.textContent].join("").trim();
};

// document
if (!document.title.trim()) faults.push("the page has no title");
if (!document.documentElement.lang) faults.push("<html> has no lang");
if (!document.querySelector("main, [role=main]")) faults.push("the page has no <main>");
const ids = [...document.querySelectorAll("[id]")].map(element => element.id);
for (const id of new Set(ids.filter((id, i) => ids.indexOf(id) !== i))) faults.push(`id "${id}" is there twice`);

// images
for (const image of all("img")) {
  const source = (image.getAttribute("src") || "").slice(0, 60);
  if (!image.complete || !image.naturalWidth) faults.push(`image ${source} did not load`);
  if (!image.hasAttribute("alt")) faults.push(`image ${source} has no alt`);
  else if (!image.alt.trim() && image.getAttribute("role") !== "presentation") faults.push(`image ${source} has an empty alt`);
}
for (const svg of all("svg:not([aria-hidden=true])")) if (!name(svg)) faults.push(`${brief(svg)} has no name`);

// headings
const headings = all("h1, h2, h3, h4, h5, h6");
const firsts = headings.filter(heading => heading.tagName === "H1").length;
if (firsts !== 1) faults.push(`there are ${firsts} <h1>, not one`);
let level = 0;
for (const heading of headings) {
  const own = Number(heading.tagName[1]);
  if (own > level + 1) faults.push(`heading ${brief(heading)} is of level ${own} after level ${level}`);
  if (!heading.textContent.trim()) faults.push(`heading ${brief(heading)} is empty`);
  level = own;
}

// names, tables, links within the page
for (const element of all("a[href], button, input:not([type=hidden]), select, textarea, summary, [role=button]"))
  if (!name(element)) faults.push(`${brief(element)} has no name`);
for (const table of all("table")) if (!table.querySelector("th")) faults.push(`${brief(table)} has no header cells`);
for (const link of all("a[href^='#']"))
  if (link.hash.length > 1 && !document.getElementById(decodeURIComponent(link.hash.slice(1))))
    faults.push(`link ${brief(link)} leads to ${link.hash}, which is not there`);

// keyboard
for (const element of all("[tabindex]"))
  if (element.tabIndex > 0) faults.push(`${brief(element)} changes the order of the tab key`);
for (const element of all("[onclick]"))
  if (element.tabIndex < 0) faults.push(`${brief(element)} can be clicked, but not reached by keyboard`);
for (const element of all("a[href], button, input, select, textarea, summary")) {
  const look = () => ["outline", "boxShadow", "border", "backgroundColor"].map(p => getComputedStyle(element)[p]).join();
  element.blur();
  const before = look();
  element.focus({ focusVisible: true, preventScroll: true });
  if (document.activeElement !== element) faults.push(`${brief(element)} cannot have the focus`);
  else if (look() === before) faults.push(`${brief(element)} does not show the focus`);
  element.blur();
}
for (const element of all("*")) {
  const overflow = getComputedStyle(element).overflowX;
  if (/auto|scroll/.test(overflow) && element.scrollWidth > element.clientWidth + 1 && element.tabIndex < 0)
    faults.push(`${brief(element)} scrolls, but cannot be reached by keyboard`);
}

// contrast (WCAG 2: 4.5, or 3 for large letters)
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const parse = colour => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = (front, back) => [0, 1, 2].map(i => front[i] * front[3] + back[i] * (1 - front[3])).concat(1);
const background = element => {
  const own = parse(getComputedStyle(element).backgroundColor);
  if (own[3] >= 1) return own;
  return over(own, element.parentElement ? background(element.parentElement) : [255, 255, 255, 1]);
};
const luminance = colour => {
  const [r, g, b] = colour.slice(0, 3).map(c => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const judged = new Set();
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || judged.has(element) || !shown(element)) continue;
  if (element.closest("svg, script, style, noscript, title")) continue;
  judged.add(element);
  const style = getComputedStyle(element);
  const back = background(element);
  const [light, dark] = [luminance(over(parse(style.color), back)), luminance(back)].sort((a, b) => b - a);
  const ratio = (light + 0.05) / (dark + 0.05);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  if (ratio < (large ? 3 : 4.5)) faults.push(`${brief(element)} has a contrast of ${ratio.toFixed(2)}`);
}

// nothing from elsewhere
for (const resource of performance.getEntriesByType("resource"))
  if (!/^(data|blob):/.test(resource.name)) faults.push(`${resource.name} is fetched from elsewhere`);
return faults;
