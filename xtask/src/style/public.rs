//! Items that are `pub` although nothing outside of their library uses them, by name.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use syn::{
    ImplItem, ImplItemFn, Item, ItemImpl, ItemMod, ItemStruct, ItemTrait, Signature, UseTree,
    Visibility,
    visit::{self, Visit},
};

use super::{GENERATED, is_for_tests};
use crate::{repository, workspace};

/// Public items of the workspace's libraries, and the names that their users contain.
#[derive(Default)]
struct Libraries {
    /// Public items of each library: name, file.
    items: BTreeMap<String, Vec<(String, PathBuf)>>,
    /// Names in the interface of each library's public items: a crate that uses such an item uses
    /// these names, too.
    interfaces: BTreeMap<String, BTreeSet<String>>,
    /// Names in each library's own code, and in each crate's programs, tests and benches.
    inside: BTreeMap<String, BTreeSet<String>>,
    outside: BTreeMap<String, BTreeSet<String>>,
}

/// Public items whose name occurs in no other crate, program, test or bench.
pub(super) fn unused() -> Result<Vec<String>> {
    let mut libraries = Libraries::default();
    for path in workspace::files()? {
        if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(repository::root().join(&path))?;
            libraries
                .add(&path, &text)
                .with_context(|| path.display().to_string())?;
        }
    }
    Ok(libraries.unused())
}

impl Libraries {
    fn add(&mut self, path: &Path, text: &str) -> Result<()> {
        let Some((dir, inner)) = workspace::crate_of(path) else {
            return Ok(());
        };
        let krate = dir.display().to_string();
        let has_library = repository::root().join(dir).join("src/lib.rs").is_file();
        let is_library = has_library
            && inner.starts_with("src")
            && !inner.starts_with("src/bin")
            && !inner.ends_with("main.rs");
        let words = if is_library {
            &mut self.inside
        } else {
            &mut self.outside
        };
        words.entry(krate.clone()).or_default().extend(names(text));
        if is_library && !path.starts_with(GENERATED) {
            let mut found = Public::default();
            found.visit_file(&syn::parse_file(text)?);
            let items = found.items.into_iter().map(|name| (name, path.to_owned()));
            self.items.entry(krate.clone()).or_default().extend(items);
            let interface = self.interfaces.entry(krate).or_default();
            interface.extend(found.interface);
        }
        Ok(())
    }

    fn unused(&self) -> Vec<String> {
        let mut unused = Vec::new();
        for (krate, items) in &self.items {
            let others = self.inside.iter().filter(|(other, _)| *other != krate);
            let users: Vec<&BTreeSet<String>> = others
                .map(|(_, names)| names)
                .chain(self.outside.values())
                .chain(self.interfaces.get(krate))
                .collect();
            for (name, path) in items {
                if !users.iter().any(|names| names.contains(name)) {
                    unused.push(format!("{}: {name}", path.display()));
                }
            }
        }
        unused
    }
}

/// Public items at the level of modules, and the names in their interfaces.
#[derive(Default)]
struct Public {
    items: Vec<String>,
    interface: BTreeSet<String>,
    /// Whether the visitor is inside an interface, where it records every name.
    takes: bool,
}

impl Public {
    fn interface(&mut self, visit: impl FnOnce(&mut Self)) {
        let before = std::mem::replace(&mut self.takes, true);
        visit(self);
        self.takes = before;
    }
}

impl<'ast> Visit<'ast> for Public {
    fn visit_item(&mut self, item: &'ast Item) {
        let (visibility, attributes, name) = match item {
            Item::Const(item) => (&item.vis, &item.attrs, Some(&item.ident)),
            Item::Enum(item) => (&item.vis, &item.attrs, Some(&item.ident)),
            Item::Fn(item) => (&item.vis, &item.attrs, Some(&item.sig.ident)),
            Item::Mod(item) => (&item.vis, &item.attrs, Some(&item.ident)),
            Item::Static(item) => (&item.vis, &item.attrs, Some(&item.ident)),
            Item::Struct(item) => (&item.vis, &item.attrs, Some(&item.ident)),
            Item::Trait(item) => (&item.vis, &item.attrs, Some(&item.ident)),
            Item::Type(item) => (&item.vis, &item.attrs, Some(&item.ident)),
            Item::Union(item) => (&item.vis, &item.attrs, Some(&item.ident)),
            Item::Use(item) => (&item.vis, &item.attrs, None),
            Item::Impl(_) => return visit::visit_item(self, item),
            // A macro may define an interface.
            Item::Macro(item) => {
                let tokens = item.mac.tokens.to_string();
                self.interface.extend(words(&tokens).map(ToOwned::to_owned));
                return;
            }
            _ => return,
        };
        if is_for_tests(attributes) {
            return;
        }
        let is_public = is_public(visibility);
        match item {
            Item::Mod(module) => {
                if is_public {
                    self.items.push(module.ident.to_string());
                }
                visit::visit_item(self, item);
            }
            Item::Use(import) if is_public => reexported(&import.tree, &mut self.items),
            _ if is_public => {
                self.items.extend(name.map(ToString::to_string));
                match item {
                    Item::Fn(function) => {
                        self.interface(|this| this.visit_signature(&function.sig));
                    }
                    Item::Const(constant) => self.interface(|this| this.visit_type(&constant.ty)),
                    Item::Static(item) => self.interface(|this| this.visit_type(&item.ty)),
                    _ => self.interface(|this| visit::visit_item(this, item)),
                }
            }
            _ => {}
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        for item in module.content.iter().flat_map(|(_, items)| items) {
            self.visit_item(item);
        }
    }

    fn visit_item_trait(&mut self, item: &'ast ItemTrait) {
        item.supertraits
            .iter()
            .for_each(|bound| self.visit_type_param_bound(bound));
        item.items
            .iter()
            .for_each(|item| self.visit_trait_item(item));
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        let of_trait = item.trait_.is_some();
        for member in &item.items {
            match member {
                ImplItem::Fn(function) if of_trait || is_public(&function.vis) => {
                    self.interface(|this| this.visit_impl_item_fn(function));
                }
                ImplItem::Type(item) => self.interface(|this| this.visit_type(&item.ty)),
                ImplItem::Const(item) if of_trait || is_public(&item.vis) => {
                    self.interface(|this| this.visit_type(&item.ty));
                }
                _ => {}
            }
        }
        if of_trait {
            self.interface(|this| this.visit_generics(&item.generics));
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        self.visit_signature(&function.sig);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        self.visit_signature(&function.sig);
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        self.visit_generics(&item.generics);
        let public = item.fields.iter().filter(|field| is_public(&field.vis));
        public.for_each(|field| self.visit_type(&field.ty));
    }

    fn visit_signature(&mut self, signature: &'ast Signature) {
        self.visit_generics(&signature.generics);
        signature
            .inputs
            .iter()
            .for_each(|input| self.visit_fn_arg(input));
        self.visit_return_type(&signature.output);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if self.takes {
            let names = path.segments.iter();
            self.interface
                .extend(names.map(|segment| segment.ident.to_string()));
        }
        visit::visit_path(self, path);
    }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn reexported(tree: &UseTree, names: &mut Vec<String>) {
    match tree {
        UseTree::Path(path) => reexported(&path.tree, names),
        UseTree::Name(name) => names.push(name.ident.to_string()),
        UseTree::Rename(rename) => names.push(rename.rename.to_string()),
        UseTree::Glob(_) => {}
        UseTree::Group(group) => group.items.iter().for_each(|tree| reexported(tree, names)),
    }
}

/// Words of code that may be names; comments are left out.
fn names(text: &str) -> BTreeSet<String> {
    let code = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    code.flat_map(words).map(ToOwned::to_owned).collect()
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_that_no_other_crate_names_are_found() {
        let mut libraries = Libraries::default();
        let library = "
            pub mod inner { pub fn nested() {} }
            pub fn used() -> Result<Returned, u8> { todo() }
            pub enum Returned { A(Part) }
            pub struct Part { pub(crate) hidden: Hidden, private: Private }
            pub struct Hidden;
            pub struct Private;
            pub(crate) fn private() {}
            pub const UNUSED: u8 = 1;
            #[cfg(test)]
            pub mod tests {}
            pub use other::Exported;
        ";
        libraries
            .add(Path::new("limits/src/lib.rs"), library)
            .unwrap();
        // A name in a comment or in the library itself is not a use.
        let other = "use limits::{inner, used}; // UNUSED\n";
        libraries
            .add(Path::new("daemon/src/lib.rs"), other)
            .unwrap();
        libraries
            .add(Path::new("limits/tests/t.rs"), "fn t() { nested() }")
            .unwrap();
        let unused = ["Hidden", "Private", "UNUSED", "Exported"];
        assert_eq!(
            libraries.unused(),
            unused.map(|name| format!("limits/src/lib.rs: {name}"))
        );
    }
}
