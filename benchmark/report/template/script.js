const root = document.documentElement;
const sections = [...document.querySelectorAll("main > section")];
root.classList.add("scripted");
for (const each of document.querySelectorAll(".tools, .filter, .methods, .choices")) each.hidden = false;

// --- charts: drawn when their section is opened, again when the colours change ---
const views = new Map(); // section -> its charts

const colours = () => {
  const own = getComputedStyle(document.body);
  const of = (name) => own.getPropertyValue(name).trim();
  const axis = { labelColor: of("--quiet"), titleColor: of("--quiet"), gridColor: of("--faint"), domainColor: of("--rule"), tickColor: of("--rule"), titleFontWeight: 500 };
  return {
    background: "transparent", font: own.fontFamily, view: { stroke: null }, axis,
    mark: { color: of("--c0") }, text: { color: of("--text") }, style: { "on-mark": { color: of("--sheet") } },
    legend: { labelColor: of("--quiet"), titleColor: of("--quiet") },
    range: { category: [...Array(10).keys()].map((n) => of("--c" + n)), heatmap: [of("--faint"), of("--c0")], ramp: [of("--faint"), of("--c0")] },
  };
};

const hidden = (section) => [...section.querySelectorAll(".methods [data-name]")].filter((b) => b.ariaPressed !== "true").map((b) => b.dataset.name);

const draw = async (section) => {
  const data = section.querySelector("script");
  if (!data || views.has(section)) return;
  views.set(section, []);
  const specs = JSON.parse(data.textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  for (const place of section.querySelectorAll(".chart")) {
    const options = {
      mode: "vega-lite", ast: true, renderer: "svg", config: colours(), tooltip: { theme: dark ? "dark" : "light" },
      actions: { export: true, source: false, compiled: false, editor: false }, downloadFileName: section.id,
    };
    const spec = specs[place.dataset.spec];
    views.get(section).push({ spec, view: (await vegaEmbed(place, spec, options)).view });
  }
  show(section);
  choose(section);
  section.dataset.drawn = "";
};

const show = (section) => {
  const names = hidden(section);
  for (const { spec, view } of views.get(section) ?? []) {
    if (!spec.params || spec.usermeta?.chosen) continue;
    view.signal("hidden", names);
    const rows = new Set(spec.data.values.map((row) => row.method).filter((name) => !names.includes(name))).size;
    if (spec.usermeta) view.height(spec.usermeta.row * Math.max(rows, 1));
    view.runAsync();
  }
};

// Charts of kept images show one run, client and class.
const choose = (section) => {
  const fields = section.querySelector(".choices");
  if (!fields) return;
  const run = fields.querySelector("[name=run]").value;
  for (const part of fields.querySelectorAll("[data-run]")) part.hidden = part.dataset.run !== run;
  const [client, of] = fields.querySelectorAll(`[data-run="${run}"] select`);
  const names = [...of.options].filter((option) => Number(option.value) >= 0).map((option) => option.text);
  const chosen = { run: Number(run), client: Number(client.value), of: Number(of.value), names };
  for (const { spec, view } of views.get(section) ?? []) {
    if (!spec.usermeta?.chosen) continue;
    for (const [name, value] of Object.entries(chosen)) view.signal(name, value);
    view.runAsync();
  }
};

for (const fields of document.querySelectorAll(".choices")) {
  fields.addEventListener("change", ({ target }) => {
    for (const other of fields.querySelectorAll(`[name="${target.name}"]`)) { // the next run shows the same, if it has it
      if ([...other.options].some((option) => option.value === target.value)) other.value = target.value;
    }
    choose(fields.closest("section"));
  });
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  views.clear();
  draw(sections.find((each) => each.classList.contains("open")));
});

for (const group of document.querySelectorAll(".methods")) {
  const buttons = [...group.querySelectorAll("[data-name]")];
  const ranked = buttons.filter((button) => button.ariaPressed === "true");
  const press = (chosen) => {
    for (const button of buttons) button.ariaPressed = String(chosen.includes(button));
    show(group.closest("section"));
  };
  const shown = () => buttons.filter((button) => button.ariaPressed === "true");
  for (const button of buttons) {
    button.addEventListener("click", () => press(shown().includes(button) ? shown().filter((b) => b !== button) : [...shown(), button]));
    button.addEventListener("dblclick", () => press([button]));
  }
  group.querySelector(".all").addEventListener("click", () => press(buttons));
  group.querySelector(".ranked").addEventListener("click", () => press(ranked));
}

// --- one section at a time; an address inside a section opens that section ---
const open = (moved) => {
  let wanted = location.hash.slice(1);
  try {
    wanted = decodeURIComponent(wanted);
  } catch {} // an address that somebody has cut: it opens the first section
  const target = wanted ? document.getElementById(wanted) : null;
  const section = target?.closest("main > section") ?? sections[0];
  for (const each of sections) each.classList.toggle("open", each === section);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === "#" + section.dataset.nav) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const heading = section.querySelector("h2");
  document.title = heading.textContent + " – " + document.querySelector("h1").textContent;
  if (moved && target) {
    if (target === section) scrollTo(0, 0);
    else target.scrollIntoView();
    heading.tabIndex = -1;
    heading.focus({ preventScroll: true });
  }
  draw(section);
};
addEventListener("hashchange", () => open(true));
open(Boolean(location.hash));

// --- tables: sorted by a heading, numbers by data-value, the rest by text; saved as CSV and LaTeX ---
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const numeric = head.dataset.kind === "number";
      const before = head.getAttribute("aria-sort");
      const direction = before ? (before === "descending" ? "ascending" : "descending") : numeric ? "descending" : "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      const rows = [...table.tBodies[0].rows].map((row) => ({ row, text: row.cells[column].textContent.trim(), number: Number(row.cells[column].dataset.value ?? NaN) }));
      rows.sort((a, b) => {
        if (!numeric) return sign * a.text.localeCompare(b.text);
        if (isNaN(a.number) || isNaN(b.number)) return isNaN(a.number) - isNaN(b.number); // unknown last, either way
        return sign * (a.number - b.number);
      });
      table.tBodies[0].append(...rows.map((each) => each.row));
    });
  });
}

const words = (cell) => [...cell.childNodes].map((node) => (node.nodeName === "SMALL" ? ` (${node.textContent})` : node.textContent)).join("").replace(/\s+/g, " ").trim();
const texts = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => words(cell).replace(/^–$/, "").replace(/(\d),(?=\d{3})/g, "$1").replaceAll("\u2212", "-")));
// A spreadsheet would run what begins like a formula; names come from others.
const harmless = (text) => (/^[=@+-]/.test(text) && !/^[+-][\d.][\d\s.,±%()to+-]*$/.test(text) ? "'" + text : text);
const forms = {
  csv: (rows) => rows.map((row) => row.map(harmless).map((text) => (/[",]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text)).join(",") + "\r\n").join(""),
  tex: ([head, ...rows]) => {
    const plain = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "–": "--" };
    const line = (row) => row.map((text) => text.replace(/[\\~^±–]|[&%$#_{}]/g, (c) => plain[c] ?? "\\" + c).replace(/^-(?=[\d.])/, "$-$")).join(" & ") + " \\\\\n";
    return `% \\usepackage{booktabs}\n\\begin{tabular}{l${"r".repeat(head.length - 1)}}\n\\toprule\n${line(head)}\\midrule\n${rows.map(line).join("")}\\bottomrule\n\\end{tabular}\n`;
  },
};
for (const button of document.querySelectorAll("[data-save]")) {
  button.addEventListener("click", () => {
    const place = button.closest(".numbers").querySelector(".scroll");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([forms[button.dataset.save](texts(place.querySelector("table")))], { type: "text/plain" }));
    link.download = place.ariaLabel.toLowerCase().replace(/[^a-z0-9]+/g, "_").slice(0, 80) + "." + button.dataset.save;
    link.click();
    URL.revokeObjectURL(link.href);
  });
}

// --- which boards and rows are shown ---
for (const form of document.querySelectorAll(".filter")) {
  const boards = [...form.closest("section").querySelectorAll(".board")];
  const filter = () => {
    const asked = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const board of boards) board.hidden = !asked.every((word) => board.textContent.toLowerCase().includes(word));
    form.querySelector("output").textContent = `${boards.filter((board) => !board.hidden).length} of ${boards.length} leaderboards`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
}
