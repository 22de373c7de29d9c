//! Circles between the files of a crate.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, Result};
use syn::{
    ItemMod, ItemUse, UseTree, VisRestricted, Visibility,
    visit::{self, Visit},
};

use super::modules::{Edges, circles, describe};
use crate::{repository, style::is_for_tests, workspace};

/// Crates whose files still use one another in circles.
const WITH_CIRCLES: [&str; 8] = [
    "agent",
    "agent/cluster",
    "agent/datapath",
    "bpf",
    "dns-policy",
    "e2e",
    "netpol",
    "sdp",
];

/// Every circle between files of the other crates, one line each.
pub(super) fn problems() -> Result<Vec<String>> {
    let mut crates: BTreeMap<String, Files> = BTreeMap::new();
    for file in workspace::files()? {
        let Some((dir, inner)) = workspace::crate_of(&file) else {
            continue;
        };
        let Ok(inner) = inner.strip_prefix("src") else {
            continue;
        };
        if file.extension().is_none_or(|ext| ext != "rs") || workspace::is_test_file(inner) {
            continue;
        }
        let text = fs::read_to_string(repository::root().join(&file))?;
        let parsed = syn::parse_file(&text).with_context(|| file.display().to_string())?;
        let files = crates.entry(dir.display().to_string()).or_default();
        files.add(inner, &file, &parsed);
    }
    let mut problems = Vec::new();
    for (krate, files) in &crates {
        let edges = files.edges();
        let found = circles(&edges);
        if WITH_CIRCLES.contains(&krate.as_str()) {
            if found.is_empty() {
                problems.push(format!(
                    "{krate}: no files in a circle any more; remove it from xtask/src/lint/files.rs"
                ));
            }
            continue;
        }
        problems.extend(found.iter().map(|circle| describe(krate, &edges, circle)));
    }
    Ok(problems)
}

/// A path of modules from the root of the crate, `a::b`; empty for the root.
type Module = Vec<String>;

/// The files of one crate.
#[derive(Default)]
struct Files(BTreeMap<Module, Found>);

/// Modules that a file uses, and names that it exports.
#[derive(Default)]
struct Found {
    file: String,
    /// Path of the file's own module.
    module: Module,
    /// Number of inline modules around the item that is read.
    inline: usize,
    /// Absolute paths in the crate.
    uses: Vec<Module>,
    /// Names that it re-exports, with the paths that they stand for.
    exports: BTreeMap<String, Module>,
}

impl Files {
    fn add(&mut self, inner: &Path, file: &Path, parsed: &syn::File) {
        let mut module: Module = inner
            .with_extension("")
            .iter()
            .map(|part| part.to_string_lossy().into_owned())
            .collect();
        if ["lib", "main"]
            .map(|root| vec![root.to_owned()])
            .contains(&module)
        {
            module.clear();
        }
        let mut found = Found {
            file: file.display().to_string(),
            module: module.clone(),
            ..Found::default()
        };
        found.visit_file(parsed);
        self.0.insert(module, found);
    }

    fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (module, found) in &self.0 {
            for used in &found.uses {
                let Some(used) = self.file_of(used) else {
                    continue;
                };
                if used != module {
                    let from = edges.entry(module.join("::")).or_default();
                    from.insert(used.join("::"), found.file.clone());
                }
            }
        }
        edges
    }

    /// The file to which a path leads: the file of its module, or of the re-exported item.
    fn file_of(&self, path: &[String]) -> Option<&Module> {
        let mut path = path.to_vec();
        // A re-export may lead to another one. The limit ends circles of re-exports.
        for _ in 0..8 {
            let length = (0..=path.len())
                .rev()
                .find(|length| self.0.contains_key(&path[..*length]))?;
            let (module, found) = self.0.get_key_value(&path[..length])?;
            let next = path.get(length).and_then(|name| found.exports.get(name));
            match next {
                Some(next) => path = [next.as_slice(), &path[length + 1..]].concat(),
                None => return (length > 0 || path.len() > 1).then_some(module),
            }
        }
        None
    }
}

impl Found {
    /// A path in the crate from its root; `None` if it is of another crate or of an inline module.
    fn absolute(&self, path: &[String]) -> Option<Module> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" if self.inline == 0 => Some([self.module.as_slice(), rest].concat()),
            "super" => {
                let above = path.iter().take_while(|part| *part == "super").count();
                let above = above.checked_sub(self.inline)?;
                let left = self.module.len().checked_sub(above)?;
                let rest = path.iter().skip_while(|part| *part == "super").cloned();
                Some(self.module[..left].iter().cloned().chain(rest).collect())
            }
            _ => None,
        }
    }

    fn import(&mut self, tree: &UseTree, before: &[String], exports: bool) {
        let mut path = before.to_vec();
        let (name, last) = match tree {
            UseTree::Path(tree) => {
                path.push(tree.ident.to_string());
                return self.import(&tree.tree, &path, exports);
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(tree, before, exports);
                }
                return;
            }
            UseTree::Glob(_) => (None, None),
            UseTree::Name(name) => (Some(name.ident.to_string()), Some(name.ident.to_string())),
            UseTree::Rename(name) => (Some(name.rename.to_string()), Some(name.ident.to_string())),
        };
        path.extend(last.filter(|last| last != "self"));
        let Some(absolute) = self.absolute(&path) else {
            return;
        };
        // A module's re-export from a module below it does not count as a use.
        let is_below = absolute.starts_with(&self.module) && exports;
        if let (Some(name), true) = (name, exports) {
            self.exports.insert(name, absolute.clone());
        }
        if !is_below {
            self.uses.push(absolute);
        }
    }
}

impl<'ast> Visit<'ast> for Found {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.inline += 1;
        visit::visit_item_mod(self, module);
        self.inline -= 1;
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let exports = !matches!(item.vis, Visibility::Inherited);
        self.import(&item.tree, &[], exports);
    }

    /// Visits nothing: the path in `pub(in crate::…)` is not a use.
    fn visit_vis_restricted(&mut self, _: &'ast VisRestricted) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Module = path
            .segments
            .iter()
            .map(|part| part.ident.to_string())
            .collect();
        self.uses.extend(self.absolute(&names));
        visit::visit_path(self, path);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn circles_of(files: &[(&str, &str)]) -> BTreeSet<BTreeSet<String>> {
        let mut all = Files::default();
        for (path, text) in files {
            let parsed = syn::parse_file(text).unwrap();
            all.add(Path::new(path), Path::new(path), &parsed);
        }
        circles(&all.edges())
    }

    #[test]
    fn a_circle_through_a_reexport_and_an_inline_path_is_found() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            (
                "a.rs",
                "mod inner; pub use self::inner::Inner; pub struct A;",
            ),
            ("a/inner.rs", "pub struct Inner; fn f() { crate::b::g(); }"),
            ("b.rs", "use super::a::Inner; pub fn g() {}"),
        ];
        let circle = ["a::inner", "b"].map(ToOwned::to_owned).into();
        assert_eq!(circles_of(&files), [circle].into());
    }

    #[test]
    fn tests_visibility_and_own_items_are_no_uses() {
        let files = [
            (
                "a.rs",
                "use crate::b::B; pub(in crate::b) struct A; fn f() { self::g() } fn g() {}",
            ),
            (
                "b.rs",
                "pub struct B; #[cfg(test)] mod tests { use crate::a::A; use super::*; }",
            ),
        ];
        assert!(circles_of(&files).is_empty());
    }
}
