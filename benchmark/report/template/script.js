"use strict";
(() => {
  const root = document.documentElement;
  const sections = [...document.querySelectorAll("main > section")];
  const links = [...document.querySelectorAll("nav a")];

  // One section at a time; an address inside a section opens that section.
  const open = (moved) => {
    const wanted = decodeURIComponent(location.hash.slice(1));
    const target = wanted ? document.getElementById(wanted) : null;
    const section = (target && target.closest("main > section")) || sections[0];
    for (const each of sections) each.classList.toggle("open", each === section);
    for (const link of links) {
      if (link.hash === "#" + (section.dataset.nav || section.id)) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = section.querySelector("h2").textContent + " – " + document.querySelector("h1").textContent;
    if (moved && target) {
      if (target === section) scrollTo(0, 0);
      else target.scrollIntoView();
      const heading = section.querySelector("h2");
      heading.tabIndex = -1;
      heading.focus({ preventScroll: true });
    }
  };
  root.classList.add("scripted");
  addEventListener("hashchange", () => open(true));
  open(Boolean(location.hash));

  // Every table with buttons in its head can be sorted; numbers by data-value, the rest by text.
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const numeric = head.dataset.kind === "number";
        const before = head.getAttribute("aria-sort");
        const direction = before ? (before === "descending" ? "ascending" : "descending") : numeric ? "descending" : "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", direction);
        const sign = direction === "ascending" ? 1 : -1;
        const value = (row) => {
          const cell = row.cells[column];
          return numeric ? (cell.dataset.value === "" ? NaN : Number(cell.dataset.value)) : cell.textContent.trim();
        };
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const x = value(a), y = value(b);
          if (!numeric) return sign * x.localeCompare(y);
          if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y); // unknown last, either way
          return sign * (x - y);
        });
        table.tBodies[0].append(...rows);
      });
    });
  }

  // The leaderboard's filters.
  const form = document.getElementById("filters");
  if (!form) return;
  const rows = [...document.querySelectorAll("#board tbody tr")];
  const said = document.getElementById("shown");
  const filter = () => {
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = ["method", "data", "reading"].map((name) => [name, form.elements[name].value]);
    let count = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word)) || chosen.some(([name, value]) => value && row.dataset[name] !== value);
      count += !row.hidden;
    }
    said.textContent = `${count} of ${rows.length} rows`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("change", filter); // some browsers say only this of a select
  form.addEventListener("reset", () => setTimeout(filter));
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
})();
