// The page from top to bottom.
"use strict";
(() => {
  const { el } = relay;
  const AT_ONCE = ["overview", "findings", "curves"];
  const WHEN_NEAR = ["timeline", "time", "rollouts", "events", "config", "environment"];

  document.getElementById("theme").addEventListener("click", relay.toggleTheme);
  document.getElementById("written").textContent = `written ${relay.moment(relay.report.written)}`;
  const begin = (part) => {
    const host = document.querySelector(`#${part} .body`);
    relay.attempt(host, () => relay[part](host));
  };
  AT_ONCE.forEach(begin);
  for (const part of WHEN_NEAR) relay.soon(document.getElementById(part), () => begin(part));

  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const counted = links.get("findings");
  const numFindings = relay.runs.reduce((sum, run) => sum + run.findings.length, 0);
  if (numFindings) counted.append(el("span.count", {}, String(numFindings)));
  // The section whose part stands below the head of the page.
  const inSight = new Set();
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) inSight[isIntersecting ? "add" : "delete"](target.id);
      const first = [...links.keys()].find((id) => inSight.has(id));
      for (const [id, link] of links) link.classList.toggle("here", id === first);
    },
    { rootMargin: "-15% 0px -75% 0px" },
  );
  for (const section of document.querySelectorAll("main section")) observer.observe(section);
  document.documentElement.dataset.ready = "true";
})();
